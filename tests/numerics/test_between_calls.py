"""What users do to weights, gradients and parameters between two calls is seen by the next one, or refused.

Tests ``optim/check.py``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.compare import Result, check, full_values, mine, seeded
from ranks import run, warned
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from traced import compile_once

import zerograph
from zerograph.core.errors import (
    CollectiveMismatch,
    ConfigError,
    RankError,
    ShardingError,
    UnsupportedError,
    ZeroGraphError,
)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.head(torch.tanh(self.left(x) if left else self.right(x)))


def made(stage: int | None, of: type[Branches] = Branches, once: bool = False) -> tuple[Branches, Any]:
    """A model and its backend; of the plain model (None) with a ``no_sync`` that does nothing. With ``once`` the model
    is traced once in a process, which takes most of a test's time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = of()
    if stage is None:
        return model, contextlib.nullcontext
    backend = zerograph.backend(stage=stage, compute="eager")
    compile_once(model, backend) if once else model.compile(backend=backend)
    return model, backend.no_sync


def loss(model: nn.Module, seed: int, left: bool = True, call: Callable[..., Tensor] | None = None) -> Tensor:
    x = torch.randn(4 * dist.get_world_size(), 8, generator=seeded(seed))
    compiled = model.__dict__.get("_compiled_call_impl") is not None
    return (call or model)(mine([x])[0] if compiled else x, left).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for n, g in grads.items()}


# Gradients held back.


def held_for_a_branch_that_is_not_taken_again(model: Any, no_sync: Any) -> None:
    with no_sync():
        loss(model, 1, left=True).backward()
    loss(model, 2, left=False).backward()


def held_until_an_uncompiled_backward(model: Any, no_sync: Any) -> None:
    loss(model, 1).backward()
    model.zero_grad()
    with no_sync():
        loss(model, 2).backward()
    loss(model, 3, call=model.forward).backward()


def held_and_zeroed_by_foreach(model: Any, no_sync: Any) -> None:
    loss(model, 1).backward()
    optimizer = torch.optim.SGD(model.parameters(), foreach=True)
    optimizer.zero_grad(set_to_none=False)
    with no_sync():
        loss(model, 2).backward()
    optimizer.zero_grad(set_to_none=False)
    loss(model, 3).backward()


def held_and_zeroed(model: Any, no_sync: Any) -> None:
    with no_sync():
        loss(model, 2).backward()
    model.zero_grad(set_to_none=False)
    loss(model, 3).backward()


def held_on_top_of_zeros(model: Any, no_sync: Any) -> None:
    loss(model, 1).backward()
    model.zero_grad(set_to_none=False)
    for seed in (2, 3):
        with no_sync():
            loss(model, seed).backward()
    loss(model, 4).backward()


def held_after_a_batch_was_dropped(model: Any, no_sync: Any) -> None:
    """Gradients of the head alone, so that the last rank has nothing to look at."""
    for frozen in (model.left, model.right):
        frozen.requires_grad_(False)
    with no_sync():
        loss(model, 1).backward()
    model.zero_grad()
    for seed in (2, 4):
        with no_sync():
            loss(model, seed).backward()
        loss(model, seed + 1).backward()


def held_until_a_closure(model: Any, no_sync: Any) -> None:
    """The last micro-batch is inside of the step, as under Lightning's Trainer."""
    with no_sync():
        loss(model, 1).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step(lambda: loss(model, 2).backward())  # type: ignore[arg-type]


HELD = [
    held_for_a_branch_that_is_not_taken_again,
    held_until_an_uncompiled_backward,
    held_and_zeroed_by_foreach,
    held_and_zeroed,
    held_on_top_of_zeros,
    held_after_a_batch_was_dropped,
    held_until_a_closure,
]

ZEROED = (held_and_zeroed_by_foreach, held_and_zeroed, held_after_a_batch_was_dropped)
"""On four ranks, of which the last has no rows of the head and looks at other gradients."""


def _held(scenario: Callable[[Any, Any], None]) -> dict[int | None, Result]:
    """Stage 3 from end to end, and the others of a model that is traced once."""
    results = {}
    for stage in (None, 0, 1, 3):  # stage 2 reduces as stage 1 does
        model, no_sync = made(stage, once=stage != 3)
        scenario(model, no_sync)
        results[stage] = Result([0.0], gradients(model))
    return results


@pytest.mark.parametrize("scenario", HELD, ids=lambda s: s.__name__)
def test_held_gradients(scenario: Callable[[Any, Any], None]) -> None:
    for results in run(4 if scenario in ZEROED else 2, _held, scenario):
        check(results)
        assert set(results[3].values) == set(results[None].values)


def _held_by_a_copy() -> dict[int | None, Result]:
    results = {}
    for stage in (None, 1, 3):
        model, no_sync = made(stage)
        with no_sync():
            loss(model, 1).backward()
        loss(model, 2).backward()
        model.zero_grad()
        other = copy.deepcopy(model)
        if stage is not None:
            backend = zerograph.backend(stage=stage, compute="eager")
            other.compile(backend=backend)
            no_sync = backend.no_sync
        with no_sync():
            loss(other, 3).backward()
        other.zero_grad()
        loss(other, 4).backward()
        results[stage] = Result([0.0], gradients(other))
    return results


def test_a_copy_drops_gradients_too() -> None:
    for results in run(2, _held_by_a_copy):
        check(results)


def _refused_while_held() -> None:
    model, no_sync = made(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_sync():
        loss(model, 1).backward()
    for closure in (None, lambda: 0.0):
        with pytest.raises(ZeroGraphError, match="holds back gradients of 4 parameters"):
            optimizer.step(closure)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
    with pytest.raises(ZeroGraphError, match="was changed while no_sync"):
        loss(model, 2).backward()
    optimizer.zero_grad()
    loss(model, 3).backward()
    optimizer.step()


def test_what_held_gradients_do_not_allow_is_refused() -> None:
    run(2, _refused_while_held)


# Weights edited between two forwards that nothing connects.


def by_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def by_foreach(model: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.5)


def by_local_shards(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            (p.to_local() if hasattr(p, "to_local") else p).mul_(0.5)


def by_a_loaded_checkpoint(model: nn.Module) -> None:
    """What DCP does in place: into the storage of the shards."""
    half = {name: value.detach() * 0.5 for name, value in model.state_dict().items()}
    state = {name: value.detach() for name, value in model.state_dict().items()}
    folder = [None]
    if dist.get_rank() == 0:
        import tempfile

        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    if any(hasattr(v, "to_local") for v in state.values()):
        dcp.save(half, checkpoint_id=folder[0])
        dcp.load(state, checkpoint_id=folder[0])
    else:
        by_data(model)


EDITS = [by_data, by_foreach, by_local_shards, by_a_loaded_checkpoint]


def _edited(edit: Callable[[nn.Module], None]) -> dict[int | None, list[float]]:
    """Stages 2, which keeps parameters gathered, and 3 from end to end, and stage 1 of a model that is traced once."""
    seen: dict[int | None, list[float]] = {}
    for stage in (None, 1, 2, 3):
        model, _ = made(stage, once=stage == 1)
        values = []
        for _ in range(2):
            value = loss(model, 1).detach().clone()
            if stage is not None:
                dist.all_reduce(value)
                value /= dist.get_world_size()
            values.append(value.item())
            edit(model)
        seen[stage] = values
    return seen


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.__name__)
def test_edits_are_seen_at_every_stage(edit: Callable[[nn.Module], None]) -> None:
    for seen in run(2, _edited, edit):
        assert seen[1] == seen[2] == seen[3] == pytest.approx(seen[None], rel=1e-6)
        assert seen[3][0] != seen[3][1]


# What was on parameters before they were sharded.


def _hooks() -> None:
    for stage in (0, 3):
        model, _ = made(stage)
        model.left.weight.no_decay = True
        handle = model.left.weight.register_hook(lambda g: g * 0)
        model.right.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        (loss(model, 1) + loss(model, 1, left=False)).backward()
        assert model.get_parameter("left.weight").no_decay
        found = gradients(model)
        assert found["left.weight"].abs().sum() == 0 and "right.bias" not in found
        handle.remove()
        loss(model, 1).backward()
        assert gradients(model)["left.weight"].abs().sum() > 0


def test_hooks_and_attributes_outlive_sharding() -> None:
    run(2, _hooks)


def _stale_optimizers() -> None:
    model, _ = made(3)
    before = tuple(model.parameters())
    loss(model, 1).backward()
    with pytest.raises(UnsupportedError, match="SGD holds 6 parameters that the model no longer has"):
        torch.optim.SGD(before, lr=0.1).step()


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    run(2, _stale_optimizers)


class StepsByDot(torch.optim.Optimizer):
    """As Prodigy and D-Adaptation: a step size from dot products, which they read with ``.item()``."""

    def __init__(self, params: Any, read: Callable[[Tensor], Any], **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})
        self.read = read

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.data, alpha=-group["lr"] * self.read(p))


def _of_own_rows(p: Tensor) -> float:
    return torch.dot(p.grad.flatten(), p.data.flatten()).item()


def _of_rows_of_all(p: Tensor) -> float:
    assert p.isfinite().all()
    return torch.dot(p.grad.flatten(), p.data.flatten()).full_tensor().item()


def _logs(model: nn.Module, seen: list[float]) -> None:
    seen.append(_of_own_rows(model.get_parameter("left.weight")))


def _numbers_of_own_rows() -> None:
    for read in (_of_rows_of_all, _of_own_rows):
        model, _ = made(3)
        optimizer = StepsByDot(model.left.parameters(), read)
        loss(model, 1).backward()
        if read is _of_own_rows:
            seen = list[float]()
            with pytest.raises(UnsupportedError, match=r"StepsByDot.step\(\) reads a number of this rank's rows alone"):
                optimizer.step(functools.partial(_logs, model, seen))
            assert len(seen) == 1  # a closure may
        else:
            optimizer.step()
        _of_own_rows(model.get_parameter("left.weight"))  # outside of a step it is read as ever
    model, _ = made(3)
    loss(model, 1).backward()
    StepsByDot(model.left.parameters(), _of_own_rows, fsdp_in_use=True).step()  # says that it adds up by itself
    model, _ = made(0)
    loss(model, 1).backward()
    StepsByDot(model.left.parameters(), _of_own_rows).step()


def test_a_step_by_a_number_of_own_rows_is_refused() -> None:
    run(2, _numbers_of_own_rows)


def _outside(kind: type[torch.optim.Optimizer], **options: Any) -> None:
    """A weight of losses that the loop adds up, which no model has."""
    model, _ = made(3)
    weights = nn.Parameter(torch.zeros(2))
    value = loss(model, 1)
    (value + (value.detach() * weights.exp()).sum()).backward()
    optimizers: list[Any] = [kind([*model.parameters(), weights], lr=0.1) for _ in range(2)]
    with warned() as messages:
        optimizers[0].step(**options)
        optimizers[0].step(**options)
    assert len(messages) == 1, messages
    assert "1 parameters of this AdamW are in no model" in messages[0] and "[2]: nobody averages" in messages[0]
    dist.all_reduce(weights.grad)  # as the hint says
    with warned() as messages:
        optimizers[1].step(**options)
    assert messages == []


def _parameters_outside() -> None:
    _outside(torch.optim.AdamW)
    _outside(zerograph.optim.AdamW, clip=1.0)
    # One rank alone holds such a parameter: it does not wait for the other.
    model, _ = made(3)
    weights = [nn.Parameter(torch.ones(2))] if dist.get_rank() else []
    optimizer = torch.optim.SGD([*model.parameters(), *weights], lr=0.1)
    loss(model, 1).backward()
    if dist.get_rank():
        with pytest.raises((CollectiveMismatch, RankError)):
            optimizer.step()
    else:
        optimizer.step()
        with pytest.raises((CollectiveMismatch, RankError)):
            loss(model, 1)


def test_parameters_outside_of_the_model_that_nobody_averages_are_told() -> None:
    run(2, _parameters_outside)


def _collected_in_a_step() -> None:
    old = [zerograph.backend(stage=3, compute="eager") for _ in range(3)]
    model, _ = made(3)
    loss(model, 1).backward()
    alive = [weakref.ref(backend) for backend in old]

    def collect(*_: Any) -> None:
        old.clear()
        gc.collect()

    handles = [register_optimizer_step_pre_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert not any(each() for each in alive)


def test_a_backend_may_be_collected_while_an_optimizer_steps() -> None:
    run(1, _collected_in_a_step)


def _early_step() -> None:
    model, _ = made(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # as schedulers are sometimes warmed up
    loss(model, 1).backward()
    optimizer.step()


def test_a_step_before_the_first_call_does_nothing() -> None:
    run(2, _early_step)


# Modules.


class Tied(Branches):
    def __init__(self) -> None:
        super().__init__()
        self.right.weight = self.left.weight

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.head(torch.tanh(self.right(torch.tanh(self.left(x)))))


def _to() -> None:
    for stage, of in ((0, Branches), (1, Tied), (3, Tied)):
        model, _ = made(stage, of)
        plain = of()
        plain.load_state_dict(full_values(model))
        loss(model, 1).backward()
        model.to("cpu")
        model.double()
        x = torch.randn(2, 8, generator=seeded(1)).double()
        for call in (model, model.forward):  # compiled and not
            assert torch.allclose(call(x), plain.double()(x), atol=1e-12)


def test_modules_change_their_dtype() -> None:
    run(2, _to)


def _print() -> str:
    model, _ = made(3)
    loss(model, 1)
    text = repr(model) if dist.get_rank() == 0 else ""
    loss(model, 2)
    return text


def test_one_rank_may_print_its_model() -> None:
    assert "out_features=8, bias=True" in run(2, _print)[0]


# Mistakes.


class Clamps(Branches):
    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        with torch.no_grad():
            self.left.weight.t().clamp_(-0.1, 0.1)
        return super().forward(x, left)


def _mistakes() -> None:
    model = Clamps()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    with pytest.raises(UnsupportedError, match=r"changes parameter left.weight in place \(clamp_\)"):
        model(torch.zeros(2, 8))
    model = Branches()
    backend = zerograph.backend(stage=3, compute="eager")
    with pytest.raises(ConfigError, match=r"torch.compile was given options"):
        torch.compile(model, backend=backend, options={"stage": 1})(torch.zeros(2, 8))
    with pytest.raises(ConfigError, match=r"zerograph.shard got str in the place of a Backend"):
        zerograph.shard(model, "zerograph")  # type: ignore[arg-type]
    model, _ = made(3)
    with (
        zerograph.gathered(model),
        pytest.raises(ShardingError, match=r"first call of a compiled model is inside zerograph.gathered"),
    ):
        loss(model, 1)


def test_mistakes_are_refused() -> None:
    run(2, _mistakes)


def _branches_by_rank(transport: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        model, _ = made(3)
        for left in (True, False):
            loss(model, 1, left)
        with pytest.raises((CollectiveMismatch, RankError)) as error:
            loss(model, 1, left=dist.get_rank() == 0)
        assert transport == "auto" or "about to run different programs" in str(error.value)


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_branches_that_differ_between_ranks_after_compiling(transport: str) -> None:
    run(2, _branches_by_rank, transport)


class ShapeOnly(Branches):
    """Reads nothing of a parameter but its shape."""

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return super().forward(torch.cat([x, self.right.weight[:0]]), left)


def _shape_only() -> None:
    model = ShapeOnly()
    model.compile(backend=zerograph.backend(stage=3, compute="eager"))
    model(torch.ones(2, 8)).sum().backward()
    assert gradients(model)["right.weight"].abs().sum() == 0
    torch.save(model.state_dict(), io.BytesIO())


def test_a_parameter_of_which_only_the_shape_is_read() -> None:
    run(2, _shape_only)
