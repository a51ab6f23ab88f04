"""Updates inside of backwards (``overlap=True``) equal those of ``step()`` to the bit.

They are begun by ``runtime/executor/early.py``, and made by ``optim/overlap.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.compare import full
from numerics.test_offload import HOST, OFF, Run, _rank, _same
from ranks import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import zerograph
from zerograph.core.instructions import Move
from zerograph.core.machine import is_disk, machine_named
from zerograph.core.plan import Param
from zerograph.optim.stream import Stream
from zerograph.runtime.executor.early import EarlyUpdates
from zerograph.runtime.offload import slots
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.fetches import FetchedRun
from zerograph.runtime.offload.nvme import Arena, Direction
from zerograph.runtime.torch_private import local_tensor

Make = Callable[[nn.Module], Optimizer]


def adamw(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, skip_nonfinite=False, **options)


def groups(model: nn.Module, **options: Any) -> Optimizer:
    """Parameters of one bucket in two groups, interleaved; one group has a learning rate that is a tensor."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return zerograph.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": torch.tensor(3e-3)}],
        lr=1e-2, amsgrad=True, skip_nonfinite=False, **options,
    )  # fmt: skip


def mastered(model: nn.Module, **options: Any) -> Optimizer:
    return adamw(model, master=torch.float32, **options)


def momentum(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5, skip_nonfinite=False, **options)


def lion(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.Lion(model.parameters(), lr=1e-3, skip_nonfinite=False, **options)


def adagrad(model: nn.Module, **options: Any) -> Optimizer:
    return zerograph.optim.Adagrad(model.parameters(), lr=0.1, skip_nonfinite=False, **options)


def _trains(training: Run) -> None:
    """Twenty steps, with an evaluation and held gradients in between."""
    training.steps(8)
    training.model.eval()
    with torch.no_grad():
        training.compiled(torch.zeros(2, 8, dtype=torch.long))
    training.model.train()
    for _ in range(2):
        for _ in range(2):
            with training.backend.no_sync():
                training.backward()
        training.steps(1)
    training.steps(10)


def _with_and_without(
    make: Make, trains: Callable[[Run], None] = _trains, kind: type[Run] = Run, **options: Any
) -> Run:
    """Train with and without; returns the former."""
    without, overlapping = (kind(partial(make, overlap=overlap), **options) for overlap in (False, True))
    for training in (without, overlapping):
        trains(training)
    _same(without.result(), overlapping.result())
    return overlapping


def _late(training: Run) -> set[str]:
    """Parameters that no backward updates."""
    training.backward()
    params, updated = dict(training.model.named_parameters()), training.optimizer.early.updated
    assert all(p.grad is None for p in params.values() if id(p) in updated)
    late = {name for name, p in params.items() if p.requires_grad and id(p) not in updated}
    training.optimizer.step()
    assert not training.optimizer.early.updated
    return late


def _equal(make: Make, options: dict[str, Any]) -> set[str]:
    slots.SLOT = 32 * 2**10
    return _late(_with_and_without(make, **options))


UNSHARDED = {"few", "scale"}
"""Parameters that every rank holds whole."""
BF16 = {"dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {"stage": 1}),
        (groups, {"stage": 2, **BF16}),
        (groups, {"stage": 3}),
        (momentum, {"stage": 3}),
        (adagrad, {"stage": 3, **BF16}),
        (lion, {"stage": 2}),
        (mastered, {"stage": 3, "model_dtype": torch.bfloat16}),
    ],
)
def test_in_memory(make: Make, options: dict[str, Any]) -> None:
    assert all(late <= UNSHARDED for late in run(2, _equal, make, options))


@pytest.mark.slow
def test_four_ranks() -> None:
    assert all(late <= UNSHARDED for late in run(4, _equal, groups, {"stage": 3, **BF16}))


@pytest.mark.parametrize(
    ("world_size", "make", "offload", "options"),
    [
        (1, adamw, "optimizer", {"stage": 1}),
        (2, groups, "optimizer", {"stage": 3, **BF16}),
        (1, lion, "gradients", {"stage": 3}),
        (2, groups, "gradients", {"stage": 2}),
        (2, momentum, "parameters", {"stage": 3}),
        (1, groups, "parameters", {"stage": 3, **BF16}),
        (4, groups, "parameters", {"stage": 3, **BF16}),
        (2, mastered, "parameters", {"stage": 3, "model_dtype": torch.bfloat16}),
    ],
)
def test_on_nvme(world_size: int, make: Make, offload: str, options: dict[str, Any], tmp_path: Path) -> None:
    there = {**OFF, "offload": offload, "path": str(tmp_path), **options}
    assert all(late <= UNSHARDED for late in run(world_size, _equal, make, there))


@pytest.mark.parametrize(
    ("world_size", "make", "offload", "options"),
    [
        (2, adamw, "optimizer", {"stage": 1}),
        (2, groups, "gradients", {"stage": 2, **BF16}),
        (1, groups, "parameters", BF16),
        (2, momentum, "parameters", {}),
    ],
)
def test_on_the_host(world_size: int, make: Make, offload: str, options: dict[str, Any]) -> None:
    there = {**HOST, "offload": offload, "stage": 3, **options}
    assert all(late <= UNSHARDED for late in run(world_size, _equal, make, there))


class Wide(nn.Module):
    """Shards beside which the padding of extents is little."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 512)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)) for _ in range(5)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class WideRun(Run):
    """A training of it with updates inside of backwards."""

    net = Wide

    def __init__(self, **options: Any) -> None:
        super().__init__(partial(adamw, overlap=True), **options)


def _moved(training: Run) -> Counter[tuple[str, str]]:
    """Bytes that a step moves to and from NVMe, by direction and what."""
    moved, submit = Counter[tuple[str, str]](), Arena._submit

    def counted(arena: Arena, direction: Direction, extent: Extent, tensor: Tensor, *more: Any) -> Any:
        moved[direction.name, more[-1].what] += tensor.nbytes
        return submit(arena, direction, extent, tensor, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "_submit", counted)
        training.steps(1)
    return moved


def _again(keep: Callable[..., None], options: dict[str, Any]) -> tuple[Run, Counter[tuple[str, str]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "keep", keep)
        training = WideRun(**options)
        training.steps(4)
        return training, _moved(training)


def _read_once(options: dict[str, Any]) -> None:
    sizes, keep = list[int](), EarlyUpdates.keep

    def counted(early: EarlyUpdates, bucket: int, params: Sequence[Param], runs: Sequence[FetchedRun]) -> None:
        sizes.append(sum(run.memory.nbytes for run in runs))
        keep(early, bucket, params, runs)

    (again, before), (once, moved) = (_again(how, options) for how in (lambda *_: None, counted))
    _same(again.result(), once.result())
    kept = sum(sizes) // 5  # steps
    assert before - moved == {("read", "states"): kept} and not once.backend._early._kept
    params = sum(local_tensor(p).nbytes for p in once.model.layers.parameters())
    assert kept == pytest.approx(params, rel=0.02)  # the embedding is read by no backward
    with once.backend.record() as recording:
        once.steps(1)
    programs = recording.predicted(machine_named("cpu")).programs
    moves = [each for program in programs for each in program.instructions if isinstance(each, Move)]
    forecast = sum(each.bytes for each in moves if is_disk(each.source) or is_disk(each.target))
    assert moved.total() == pytest.approx(forecast, rel=0.02)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_reads_nothing_that_its_backward_has_read(world_size: int, tmp_path: Path) -> None:
    run(world_size, _read_once, {**OFF, "offload": "parameters", "stage": 3, "path": str(tmp_path)})


def _written_meanwhile(options: dict[str, Any], forgets: bool) -> None:
    start = EarlyUpdates.start

    def changed(early: EarlyUpdates, bucket: int) -> None:
        with torch.no_grad():
            for name, _ in early._taken.get(bucket, ((), ()))[0]:
                local_tensor(early._params[name]).add_(1e-3)
        start(early, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "start", changed)
        if forgets:  # the system lets go of what was written through a mapping, and of its pages
            patch.setattr(Arena, "is_touched", lambda *_: False)
        (again, _), (once, _) = (_again(how, options) for how in (lambda *_: None, EarlyUpdates.keep))
    _same(again.result(), once.result())


@pytest.mark.parametrize("forgets", [False, True])
def test_an_update_sees_what_was_written_since(forgets: bool, tmp_path: Path) -> None:
    run(1, _written_meanwhile, {**OFF, "offload": "parameters", "stage": 3, "path": str(tmp_path)}, forgets)


class _Halves:
    """Two optimizers, each of every other parameter."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        params = [*model.parameters()]
        self.own = [zerograph.optim.AdamW(params[k::2], lr=1e-2, skip_nonfinite=False, **options) for k in (0, 1)]

    def step(self) -> None:
        for each in self.own:
            each.step()

    def zero_grad(self) -> None:
        for each in self.own:
            each.zero_grad()


def _two_owners(options: dict[str, Any]) -> None:
    found = []
    for overlap in (False, True):
        training = Run(partial(_Halves, overlap=overlap), **options)  # type: ignore[arg-type]
        training.steps(6)
        found.append((training.losses, {name: full(value) for name, value in training.model.state_dict().items()}))
    (losses, values), (others, same) = found
    assert losses == others and all(torch.equal(value, same[name]) for name, value in values.items())


def test_two_optimizers_have_parameters_of_one_bucket(tmp_path: Path) -> None:
    run(1, _two_owners, {**OFF, "offload": "parameters", "stage": 3, "path": str(tmp_path)})


def _fails_between(options: dict[str, Any]) -> None:
    training = WideRun(**options)
    training.steps(2)

    def fails(*_: Any) -> None:
        raise RuntimeError("between fetch and update")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EarlyUpdates, "start", fails)
        with pytest.raises(RuntimeError, match="between fetch and update"):
            training.backward()
    assert not training.backend._early._kept
    training.optimizer.zero_grad()
    with training.backend.no_sync():
        training.backward()
    assert not training.backend._early._kept


def test_nothing_is_kept_behind_an_error_or_by_held_gradients(tmp_path: Path) -> None:
    run(1, _fails_between, {**OFF, "offload": "parameters", "stage": 3, "path": str(tmp_path)})


def _reads_ahead(folder: str) -> tuple[int, Counter[str]]:
    slots.SLOT = 32 * 2**10
    training = Run(partial(adamw, overlap=True), stage=3, path=folder, **{**OFF, "offload": "gradients"})
    training.steps(3)
    called = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_ahead", "forget", "run"):
            method = getattr(Stream, name)
            patch.setattr(Stream, name, partialmethod(_counted, called, name, method))
        training.backward()
        training.optimizer.step()
    return len(training.optimizer._streams), called


def _counted(stream: Stream, called: Counter[str], name: str, method: Callable[..., Any], *args: Any) -> Any:
    called[name] += 1
    return method(stream, *args)


def test_states_of_the_next_bucket_are_read_ahead(tmp_path: Path) -> None:
    ((buckets, called),) = run(1, _reads_ahead, str(tmp_path))
    assert called == {"read_ahead": buckets, "run": buckets} and buckets > 2


class Embed(nn.Sequential):
    def forward(self, tokens: Tensor) -> Tensor:
        return self[0](tokens)


class Block(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + self[0](x).sin()


class Loss(nn.Sequential):
    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self[0](x).flatten(0, 1), tokens.flatten())


class Parts(nn.Module):
    """Modules that are compiled one by one; the middle one is computed again inside of a node of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = Embed(nn.Embedding(37, 64)), Block(nn.Linear(64, 64))
        self.loss = Loss(nn.Linear(64, 37))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(checkpoint(self.block, self.embed(tokens), use_reentrant=True), tokens)


class OneByOne(Run):
    """A training of :class:`Parts`."""

    def __init__(self, make: Make, **options: Any) -> None:
        torch.manual_seed(0)
        torch._dynamo.reset()
        self.backend = zerograph.backend(compute="eager", **options)
        self.compiled = self.model = zerograph.shard(Parts(), self.backend)
        for part in self.model.children():
            part.compile(backend=self.backend)
        self.optimizer = make(self.model)
        self.losses = []
        self.batches = torch.Generator().manual_seed(_rank())


def _reentrant() -> set[str]:
    return _late(_with_and_without(adamw, lambda training: training.steps(3), OneByOne, stage=3))


def test_backwards_inside_of_backwards() -> None:
    """Those of re-entrant checkpoints have numbers of their own, and end before the one around them."""
    assert all(not late for late in run(2, _reentrant))
