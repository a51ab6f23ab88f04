"""What updates inside of backwards refuse, what they leave to ``step()``, and what becomes of a backward that fails."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.compare import full
from numerics.test_offload import HOST, OFF, Net, Run, _rank, _same
from numerics.test_offload_faults import Faulty
from numerics.test_overlap import UNSHARDED, adamw
from ranks import refused, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import zerograph
from zerograph._core import FaultPoint
from zerograph.core.errors import ConfigError, RankError, StorageError, ZeroGraphError
from zerograph.optim.stream import Stream
from zerograph.optim.update import PendingUpdate
from zerograph.runtime.offload import slots


def _misused(training: Run) -> None:
    """Steps of which everything that is wrong raises, and changes nothing."""
    opt: Any = training.optimizer
    tokens = torch.zeros(2, 8, dtype=torch.long)
    training.steps(1)
    with pytest.raises(ZeroGraphError, match="without a backward"):
        opt.step()
    training.backward()
    for model_runs in (lambda: training.compiled(tokens), _without_gradients(training.compiled, tokens)):
        with pytest.raises(ZeroGraphError, match=r"reads .* which the last backward has updated(?s:.*)no_sync"):
            model_runs()
    for options, what in (({"clip": 1.0}, "clip"), ({"grad_scale": 2.0}, "grad_scale"), ({"closure": len}, "closure")):
        with pytest.raises(ConfigError, match=f"{what} with overlap=True"):
            opt.step(**options)
    for reads in (
        lambda: zerograph.clip_grad_norm_(training.model.parameters(), 1.0),
        lambda: torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0),
        lambda: zerograph.norms(training.model),
    ):
        with pytest.raises(ConfigError, match=r"gradients by which .*\(overlap=True\) has updated"):
            reads()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match=r"GradScaler|grad_scale"):
        scaler.step(opt)
    opt.param_groups[0]["lr"] *= 2
    with pytest.raises(ConfigError, match="changed between backward and step"):
        opt.step()
    opt.param_groups[0]["lr"] /= 2
    opt.step()
    opt.zero_grad()
    loss = training.compiled(tokens)
    before = [full(p.detach()).clone() for p in training.model.parameters()]
    torch.autograd.grad(loss, [p for p in training.model.parameters() if p.requires_grad])
    assert not opt.early.updated
    assert all(torch.equal(full(p.detach()), b) for p, b in zip(training.model.parameters(), before, strict=True))
    opt.early.stepped()  # the forward is forgotten, as by a step
    loss = training.compiled(tokens)
    loss.backward(retain_graph=True)
    assert opt.early.updated
    with pytest.raises((ZeroGraphError, RuntimeError), match=r"has updated|modified by an inplace operation"):
        loss.backward()
    opt.step()


def _without_gradients(call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return torch.no_grad()(lambda: call(*args))


def _plain(training: Run) -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    training.steps(1)
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    training.compiled(tokens).backward()
    training.optimizer.step()


def _misuse(options: dict[str, Any]) -> None:
    without, overlapping = (Run(partial(adamw, overlap=overlap), **options) for overlap in (False, True))
    _plain(without)
    _misused(overlapping)
    _same(without.result(), overlapping.result())


@pytest.mark.parametrize(("world_size", "options"), [(2, {"stage": 3}), (1, {**HOST, "stage": 2})])
def test_misuse_is_an_error_that_changes_nothing(world_size: int, options: dict[str, Any]) -> None:
    run(world_size, _misuse, options)


class Twice(Net):
    """Its embedding is read by two frames, and it has a loss beside them that reads a bias."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        torch._dynamo.graph_break()
        for layer in self.layers:
            x = x + layer(x)
        x = self.norm(self.frozen(x) * self.few) * self.scale
        torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.flatten())


class Breaking(Run):
    net = Twice


def _unusual(training: Run) -> set[str]:
    """Gradients that are not a backward's alone; returns whose were left to a step."""
    training.steps(1)
    params, found = dict(training.model.named_parameters()), set[str]()

    def steps(times: int = 1) -> None:
        for _ in range(times):
            early: Any = training.optimizer.early  # type: ignore[attr-defined]
            updated = early.updated if early is not None else set()
            found.update(n for n, p in params.items() if p.requires_grad and id(p) not in updated)
            training.optimizer.step()
            training.optimizer.zero_grad()

    for _ in range(3):
        training.backward()
        steps()
    tied = set(found)
    batches = [torch.randint(0, 37, (3, 8), generator=training.batches) for _ in range(2)]
    (training.compiled(batches[0]) + training.compiled(batches[1])).backward()
    steps()
    hook = params["norm.weight"].register_hook(lambda grad: grad * 2)
    training.backward()
    hook.remove()
    steps()
    params["norm.bias"].grad = torch.ones_like(params["norm.bias"])
    training.backward()
    steps()
    return tied


def _left() -> set[str]:
    without, overlapping = (Breaking(partial(adamw, overlap=overlap), stage=3) for overlap in (False, True))
    _unusual(without)
    late = _unusual(overlapping)
    _same(without.result(), overlapping.result())
    return late


@pytest.mark.slow
def test_what_has_several_gradients_is_left_to_the_step() -> None:
    for late in run(2, _left):
        assert late == {"embedding.weight", *UNSHARDED}


def _from_outside(folder: str) -> None:
    training = Run(partial(adamw, overlap=True), stage=3, path=folder, **OFF)
    training.steps(1)
    loss = training.compiled(torch.zeros(2, 8, dtype=torch.long))
    weight: Any = training.model.layers[0][0].weight  # type: ignore[index]
    (loss + weight.to_local().sum()).backward()
    with pytest.raises(ZeroGraphError, match="outside of the compiled model"):
        training.optimizer.step()
    with pytest.raises((StorageError, RankError), match="half done"):
        training.backward()


def test_a_gradient_from_outside_of_the_model_is_an_error(tmp_path: Path) -> None:
    run(2, _from_outside, str(tmp_path))


class _NoRoom(MemoryError):
    pass


def _fails(options: dict[str, Any]) -> None:
    """A backward fails on one rank when it has updated some buckets; training goes on from a checkpoint."""
    training = Run(partial(adamw, overlap=True), **options)
    training.steps(1)
    opt: Any = training.optimizer
    start = {name: full(value).clone() for name, value in training.model.state_dict().items()}
    kept, batch = opt.state_dict(), training.batches.get_state()
    kept = {**kept, "state": {k: {n: v.clone() for n, v in s.items()} for k, s in kept["state"].items()}}
    training.steps(2)
    truth = {name: full(value).clone() for name, value in training.model.state_dict().items()}
    starts, counts = training.backend._early.start, itertools.count()

    def fails(bucket: int) -> None:
        if next(counts) == 2 and _rank() == 0:
            raise MemoryError("no room")
        starts(bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.backend._early, "start", fails)
        with pytest.raises((MemoryError, RankError)):
            training.backward()
    with pytest.raises((StorageError, RankError), match="half done"):
        training.backward()
    with pytest.raises(StorageError, match=r"ended half done(?s:.*)load a checkpoint"):
        opt.step()
    training.model.load_state_dict(start)
    opt.load_state_dict(kept)
    training.batches.set_state(batch)
    opt.zero_grad()
    training.steps(2)
    assert all(torch.equal(full(value), truth[name]) for name, value in training.model.state_dict().items())


@pytest.mark.parametrize("options", [{"stage": 2}, {"stage": 3, **HOST, "offload": "parameters"}])
def test_a_backward_that_fails_half_way_needs_a_checkpoint(options: dict[str, Any]) -> None:
    run(2, _fails, options)


class Overlapping(Faulty):
    def __init__(self, folder: str) -> None:
        Run.__init__(self, partial(adamw, overlap=True), stage=3, **{**OFF, "offload": "gradients"}, path=folder)
        self.begins()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.batches.set_state(self.batch)
        self.losses = []
        self.place = "backward"
        self.backward()
        self.place = "step"
        self.optimizer.step()


def _every_transfer(folder: str) -> set[str]:
    slots.SLOT = 32 * 2**10
    training, places = Overlapping(folder), set[str]()
    training.step()
    truth = training.outcome()
    for point in (FaultPoint.read, FaultPoint.write):
        for nth in itertools.count(1):
            training.load()
            training.inject(point, nth)
            error = training.fails()
            if error is None:
                break
            assert isinstance(error, StorageError) and training.half_done, error
            places.add(training.place)
            with pytest.raises(StorageError, match=r"ended half done(?s:.*)load a checkpoint"):
                training.step()
            training.load()
            training.step()
            _same(training.outcome(), truth)
    return places


def test_any_transfer_of_an_update_may_fail(tmp_path: Path) -> None:
    (places,) = run(1, _every_transfer, str(tmp_path))
    assert places == {"backward"}  # which waits for them


def _interrupted(folder: str) -> None:
    """Ctrl-C while the end of a backward waits for updates that stream."""
    slots.SLOT = 32 * 2**10
    training, streaming = Run(partial(adamw, overlap=True), stage=3, path=folder, **OFF), [0]
    training.steps(1)
    streams, beside = Stream.run, PendingUpdate.stream_beside

    def slowly(*given: Any) -> None:
        streaming[0] += 1
        time.sleep(0.1)
        streams(*given)
        streaming[0] -= 1

    def waits(update: PendingUpdate, start: Any) -> None:
        beside(update, start)
        begun.append(update._beside)
        update._streams = (partial(waited, update._beside),)

    def waited(future: Any) -> None:
        if future is begun[-1]:  # those before it have ended
            raise KeyboardInterrupt
        future.result()

    begun: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "run", slowly)
        patch.setattr(PendingUpdate, "stream_beside", waits)
        patch.setattr(PendingUpdate, "done", lambda _: False)
        with pytest.raises(KeyboardInterrupt):
            training.backward()
        assert begun[-1].done() and streaming == [0]


def test_nothing_streams_behind_an_interrupt(tmp_path: Path) -> None:
    run(1, _interrupted, str(tmp_path))


def _two_optimizers(model: nn.Module, overlap: bool) -> tuple[Optimizer, Optimizer]:
    """Of parameters that lie side by side in one bucket, one of torch's and one of ours."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    mine = zerograph.optim.AdamW(matrices, lr=1e-2, skip_nonfinite=False, overlap=overlap)
    return mine, torch.optim.SGD(others, lr=0.1)


def _beside_another(folder: str) -> None:
    found = []
    for overlap in (False, True):
        training = Run(adamw, stage=3, path=folder, **{**OFF, "offload": "parameters"})
        optimizers = _two_optimizers(training.model, overlap)
        for _ in range(4):
            training.backward()
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
        found.append([full(value).clone() for value in training.model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_a_backward_updates_is_written_before_another_optimizer_steps(tmp_path: Path) -> None:
    run(2, _beside_another, str(tmp_path))


def _replaced() -> None:
    training = Run(partial(adamw, overlap=True), stage=3)
    training.steps(1)
    training.optimizer = adamw(training.model, overlap=True)  # the other one is gone, or is in a reference cycle
    training.steps(1)
    kept, training.optimizer = training.optimizer, adamw(training.model)
    training.backward()
    with pytest.raises(ZeroGraphError, match="which still lives, has updated parameters of this AdamW"):
        training.optimizer.step()
    assert kept


def test_an_optimizer_takes_the_place_of_another() -> None:
    run(2, _replaced)


def _refused(options: dict[str, Any]) -> None:
    training = Run(partial(adamw, overlap=True), **options)
    training.steps(1)


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [(2, {"stage": 0}, "at stage 0"), (1, {"stage": 3, "dtype": torch.bfloat16}, "on one process that offloads")],
)
def test_where_nothing_is_reduced_it_is_refused(world_size: int, options: dict[str, Any], message: str) -> None:
    for text in run(world_size, refused, _refused, options):
        assert message in text


def test_it_needs_a_backend_and_skips_nothing() -> None:
    with pytest.raises(ConfigError, match="skip_nonfinite=False beside overlap=True"):
        zerograph.optim.AdamW(nn.Linear(2, 2).parameters(), overlap=True)
    model = nn.Linear(2, 2)
    opt = zerograph.optim.AdamW(model.parameters(), overlap=True, skip_nonfinite=False)
    with pytest.raises(ConfigError, match="no backend of zerograph"):
        opt.step()
