"""Updates inside of the next forward (``overlap="forward"``) equal ordinary steps to the bit.

They are made by ``optim/delayed.py``, and awaited by ``runtime/offload/fetches.py``.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.compare import full
from numerics.test_delayed import BF16, Make, _evaluates, adagrad, adamw, groups, lion, mastered, momentum
from numerics.test_offload import BEHIND, HOST, OFF, Run, _rank, _same
from ranks import refused, run
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.nn import functional as F

import zerograph
from zerograph.core.errors import ConfigError, RankError, StorageError, ZeroGraphError
from zerograph.optim import stream


def _trains(training: Run) -> None:
    """Clipped and skipped steps, micro-batches, gradients that are kept and zeroed, evaluations in between."""
    training.steps(3)
    for _ in range(2):
        training.backward()
        training.steps(1, clip=0.1)
    _evaluates(training)
    training.steps(2)
    training.backward(float("inf"))
    training.optimizer.step()
    training.optimizer.zero_grad(False)
    training.steps(1, grad_scale=2.0)
    with training.backend.no_sync():
        training.backward()
    training.steps(1)
    _evaluates(training)
    training.backward()
    training.optimizer.step()  # whose gradients the next backward adds to
    training.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(False)
    training.steps(1)


def _equal(make: Make, options: dict[str, Any], trains: Callable[[Run], None] = _trains) -> set[str]:
    """Train by ordinary steps and with updates in the next forward; returns the names of what a step updated itself."""
    ordinary, training = Run(make, **options), Run(partial(make, overlap="forward"), **options)
    for each in (ordinary, training):
        trains(each)
    optimizer: Any = training.optimizer
    under_way = set(map(id, optimizer.late.changing))
    assert under_way  # the next forward waits for them
    _same(ordinary.result(), training.result())
    assert not optimizer.late.changing
    return {name for name, p in training.model.named_parameters() if p.requires_grad and id(p) not in under_way}


@pytest.mark.parametrize(
    ("world_size", "make", "options"),
    [
        (2, adamw, {"stage": 1}),
        (2, groups, {"stage": 3, "prefetch": 2, **BF16}),
        (1, adamw, {"stage": 1, **HOST}),
        (2, lion, {"stage": 2, **HOST, "offload": "gradients"}),
        (2, groups, {"stage": 3, **HOST, "offload": "parameters", **BF16}),
        (1, momentum, {"stage": 3, **HOST, "update": "device"}),
        (1, adamw, {"stage": 3, **OFF}),
        (2, groups, {"stage": 3, **OFF, "offload": "gradients"}),
        (2, mastered, {"stage": 3, **OFF, "offload": "parameters", "model_dtype": torch.bfloat16}),
        (1, groups, {"stage": 3, **OFF, "offload": "parameters", **BF16}),
        (2, adagrad, {"stage": 3, **BEHIND, "offload": "parameters", **BF16}),
    ],
)
def test_training_equals_ordinary_steps_to_the_bit(
    world_size: int, make: Make, options: dict[str, Any], tmp_path: Path
) -> None:
    more = {"path": str(tmp_path)} if options.get("tier") == "nvme" else {}
    for at_once in run(world_size, _equal, make, {**options, **more}):
        assert at_once <= {"few", "scale"}  # which every rank holds whole


def _looks(training: Run) -> None:
    """Whoever reads a parameter or a state sees what the step gives."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 1.0 / (1 + step))
    training.steps(2)
    seen: list[Any] = []
    for look in (
        lambda: {k: full(v) for k, v in training.model.state_dict().items()},
        lambda: get_state_dict(training.model, training.optimizer),
        lambda: copy.deepcopy(training.optimizer).state_dict(),
        lambda: _gathered(training.model),
        lambda: training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict())),
        lambda: _another_steps(training.model),
    ):
        training.steps(1)
        scheduler.step()
        seen.append(look())
        late: Any = training.optimizer
        assert late.late is None or not late.late.changing
    training.losses += [sum(float(full(t).double().sum()) for t in _tensors(value)) for value in seen]
    training.backward()
    training.optimizer.step()


def _gathered(model: nn.Module) -> list[Tensor]:
    with zerograph.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _another_steps(model: nn.Module) -> None:
    head: Any = model.norm.weight
    other = zerograph.optim.SGD([head], lr=0.1)
    head.grad = torch.ones_like(head)
    other.step()
    head.grad = None


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value.detach()]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


@pytest.mark.parametrize(
    ("world_size", "options"), [(2, {"stage": 3, **HOST, **BF16}), (1, {"stage": 3, **OFF, "offload": "parameters"})]
)
def test_whoever_looks_sees_the_step(world_size: int, options: dict[str, Any], tmp_path: Path) -> None:
    more = {"path": str(tmp_path)} if options.get("tier") == "nvme" else {}
    run(world_size, _equal, adamw, {**options, **more}, _looks)


class Broken(nn.Module):
    """A tied weight over a graph break, and a module that only some forwards call, from the second one on: it gets
    placements while updates of others are under way."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 40)
        self.first, self.second, self.seldom = nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40)
        self.head = nn.Linear(40, 37, bias=False)
        self.head.weight = self.embedding.weight
        self.again = True  # a count would compile each call anew

    def forward(self, tokens: Tensor) -> Tensor:
        self.again = not self.again
        x = self.first(self.embedding(tokens)).relu()
        torch._dynamo.graph_break()
        x = x + self.second(x).relu()
        torch._dynamo.graph_break()
        if self.again:
            x = x + self.seldom(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class BrokenRun(Run):
    net = Broken


def _equal_over_graph_breaks(options: dict[str, Any]) -> None:
    """With a bucket that no forward but every other one gathers, whose update ends with it all the same."""
    ordinary = BrokenRun(adamw, **options)
    ordinary.steps(7)
    expected = copy.deepcopy(ordinary.result())
    training = BrokenRun(partial(adamw, overlap="forward"), **options)
    late: Any = training.optimizer
    for _ in range(7):
        training.backward()
        assert not late.late.changing
        training.optimizer.step()
        assert late.late.changing
        training.optimizer.zero_grad()
    _same(expected, training.result())


@pytest.mark.parametrize("world_size", [1, 2])
def test_training_with_graph_breaks(world_size: int, tmp_path: Path) -> None:
    run(world_size, _equal_over_graph_breaks, {"stage": 3, **OFF, "offload": "parameters", "path": str(tmp_path)})


def _fails(*_: Any) -> None:
    raise MemoryError("no room")


def _an_update_fails(path: str) -> None:
    """The forward that waits for it raises, on all ranks; then a checkpoint is loaded."""
    training = Run(partial(adamw, overlap="forward"), stage=3, **OFF, path=path)
    training.steps(2)
    opt: Any = training.optimizer
    kept = copy.deepcopy(({k: full(v) for k, v in training.model.state_dict().items()}, opt.state_dict()))
    batch = training.batches.get_state()
    training.steps(2)
    truth = copy.deepcopy(training.result())
    training.backward()
    with pytest.MonkeyPatch.context() as patch:
        if _rank() == 0:
            patch.setattr(stream, "through_slots", _fails)
        opt.step()
        opt.zero_grad()
        with pytest.raises((MemoryError, RankError)) as caught:
            training.backward()
    assert type(caught.value) is (MemoryError if _rank() == 0 else RankError)
    with pytest.raises((StorageError, RankError), match=r"half done|no room"):
        training.backward()
    training.model.load_state_dict(kept[0])
    opt.load_state_dict(kept[1])
    opt.zero_grad()
    training.losses = training.losses[:2]
    training.batches.set_state(batch)
    training.steps(2)
    _same(truth, training.result())


def test_an_update_that_fails_is_heard_of_and_needs_a_checkpoint(tmp_path: Path) -> None:
    run(2, _an_update_fails, str(tmp_path), timeout=90)


def _misused() -> None:
    training = Run(partial(adamw, overlap="forward"), stage=3, **HOST)
    opt: Any = training.optimizer
    training.steps(2)
    with pytest.raises(ConfigError, match=r'start_step\(\) with overlap="forward"(?s:.*)call step\(\)'):
        opt.start_step()
    opt.step(training.backward)
    training.model.zero_grad(set_to_none=False)
    with pytest.raises(ZeroGraphError, match=r"gradients, the first of shape .* were written to(?s:.*)settle\(\)"):
        training.backward()
    with pytest.raises(StorageError, match="half done"):
        opt.step()
    training = Run(partial(adamw, overlap="forward"), stage=3, **HOST)
    training.steps(2)
    with torch.no_grad():
        training.model.norm.weight.mul_(0.9)  # type: ignore[union-attr, operator]
    with pytest.raises(
        ZeroGraphError, match=r"1 parameters, .* \[40\], were written to before the next forward, in which AdamW"
    ):
        training.backward()
    training = Run(partial(adamw, overlap="forward"), stage=3, **HOST)
    training.steps(2)
    opt = training.optimizer
    opt.settle()
    with torch.no_grad():
        training.model.norm.weight.mul_(0.9)  # type: ignore[union-attr, operator]
    training.steps(1)


def test_misuse_is_an_error() -> None:
    run(1, _misused)


def _refused(options: dict[str, Any]) -> None:
    Run(partial(adamw, overlap="forward"), **options).steps(1)


def test_where_no_forward_gathers() -> None:
    for text in run(2, refused, _refused, {"stage": 0}):
        assert re.search(r"no compiled forward gathers its parameters(?s:.*)stage=1, 2 or 3", text), text
    model = nn.Linear(4, 4)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigError, match="no compiled forward gathers"):
        adamw(model, overlap="forward").step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": "backwards"}, r"overlap='backwards'(?s:.*)overlap=\"forward\" for the next forward"),
        ({"overlap": 1}, "overlap=1"),
        ({"overlap": "forward", "delayed": True}, "overlap='forward' and delayed=True(?s:.*)leave one of them out"),
        ({"overlap": "forward", "warmup": 3}, "warmup=3"),
    ],
)
def test_arguments_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        adamw(nn.Linear(4, 4), **options)


class Sharded(nn.Module):
    """Every parameter is sharded; biases share buckets with matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(37, 90), nn.Linear(90, 40), nn.Linear(40, 37, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(F.one_hot(tokens, 37).float()).relu()
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(self.second(x)).flatten(0, 1), tokens.flatten())


class ShardedRun(Run):
    net = Sharded


def _matrices(model: nn.Module, **options: Any) -> zerograph.optim.AdamW:
    return zerograph.optim.AdamW([p for p in model.parameters() if p.ndim > 1], lr=1e-2, **options)


def _biases(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 1]


def _beside_neighbours(overlap: Any, path: str) -> list[float]:
    training = ShardedRun(partial(_matrices, overlap=overlap), stage=3, **OFF | {"offload": "parameters"}, path=path)
    stock = torch.optim.SGD(_biases(training.model), lr=0.5)
    for _ in range(6):
        training.backward()
        training.optimizer.step()
        stock.step()
        training.optimizer.zero_grad()
        stock.zero_grad()
    with torch.no_grad(), zerograph.gathered(training.model.first, writeback=True):
        training.model.first.bias.add_(0.5)  # type: ignore[union-attr, operator]
    training.backward()
    return training.losses


def _neighbours(path: str) -> None:
    assert _beside_neighbours(False, path) == _beside_neighbours("forward", path)
    training = ShardedRun(partial(_matrices, overlap="forward"), stage=3, **OFF | {"offload": "parameters"}, path=path)
    training.steps(2)
    with torch.no_grad():
        _biases(training.model)[0].add_(0.5)
    with pytest.raises(
        ZeroGraphError, match=r"1 parameters(?s:.*)were written to before the next forward, in which AdamW"
    ):
        training.backward()


def test_neighbours_on_nvme_that_the_optimizer_does_not_have(tmp_path: Path) -> None:
    run(1, _neighbours, str(tmp_path))


def _an_old_forward(options: dict[str, Any]) -> None:
    for overlap in (False, "forward"):
        training = ShardedRun(partial(adamw, overlap=overlap), **options)
        training.steps(2)
        first, second = (training.compiled(training.tokens()) for _ in range(2))
        first.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        gathers = training.backend._store.fetches.gathers()
        frames = training.backend.frames
        assert len(frames) > 1
        numbers = [{gathers[id(p)] for p in m.parameters()} for m in (training.model.first, training.model.head)]
        assert max(numbers[0]) < min(numbers[1])


@pytest.mark.parametrize("options", [HOST, OFF, {**OFF, "offload": "parameters"}])
def test_a_backward_of_a_forward_before_the_step_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    more = {"path": str(tmp_path)} if options["tier"] == "nvme" else {}
    run(1, _an_old_forward, {"stage": 3, **options, **more})


def _two_fail(path: str) -> None:
    training = ShardedRun(partial(_matrices, overlap="forward"), stage=3, **OFF | {"offload": "parameters"}, path=path)
    biases = zerograph.optim.SGD(_biases(training.model), lr=0.1, momentum=0.9, overlap="forward")
    both: tuple[Any, Any] = (training.optimizer, biases)

    def step() -> None:
        training.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()

    def twice() -> None:
        step()
        step()

    twice()
    kept = copy.deepcopy(({k: full(v) for k, v in training.model.state_dict().items()}, [o.state_dict() for o in both]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "through_slots", _fails)
        with pytest.raises(MemoryError):  # of the second step, or of the forward behind it
            twice()
    for optimizer, states in zip(both, kept[1], strict=True):
        training.model.load_state_dict(kept[0])
        optimizer.load_state_dict(states)
        optimizer.zero_grad()
    twice()


def test_two_updates_that_fail_need_one_checkpoint(tmp_path: Path) -> None:
    run(1, _two_fail, str(tmp_path))
