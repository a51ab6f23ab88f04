"""Gradients that are held back: summed with the next ones, dropped when the user drops them, never lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from waits import Unread

from zerograph.core.errors import UnsupportedError, ZeroGraphError
from zerograph.core.layout import Layout
from zerograph.core.plan import tile_params
from zerograph.core.step import Param
from zerograph.runtime.comm.collectives import GroupCommunicator
from zerograph.runtime.executor import accumulation
from zerograph.runtime.executor.accumulation import GradientAccumulation

CPU = torch.device("cpu")


def spec(name: str) -> Param:
    return Param(name, (2,), "float32", "float32", "float32", True, Layout("rows", 1))


class Programs:
    """What programs do with a accumulation, for parameters that are multiplied by a number and summed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.params = {name: nn.Parameter(torch.ones(2)) for name in ("w", "v")}
        self.accumulation = GradientAccumulation(self.params)
        self.comm = GroupCommunicator(group, CPU)

    def backward(self, *names: str, by: float, held: bool = False) -> None:
        with self.accumulation.holding_back() if held else nullcontext():
            sum(Read.apply(self.params[name], torch.zeros(2), self, spec(name), by) for name in names).backward()

    def read(self, param: str | Tensor, by: float) -> tuple[Tensor, Tensor]:
        """An input and the loss of one program, of w if ``param`` is computed from that."""
        x = torch.zeros(2, requires_grad=True)
        name, value = (param, self.params[param]) if isinstance(param, str) else ("w", param)
        return x, Read.apply(value, x, self, spec(name), by)

    def uncompiled(self, name: str, by: float) -> None:
        """A backward that no program has part in."""
        (self.params[name].sum() * by).backward()

    def grads(self, name: str = "w") -> list[float]:
        grad = self.params[name].grad
        assert grad is not None
        return grad.tolist()


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, x: Tensor, programs: Programs, spec: Param, by: float) -> Tensor:
        ctx.programs, ctx.spec, ctx.by = programs, spec, by
        return (param + x).sum() * by

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        accumulation, grad = ctx.programs.accumulation, torch.full((2,), ctx.by)
        if accumulation.active:
            (result,) = accumulation.hold([ctx.spec], [grad], ctx.programs.comm)
        else:
            (result,) = accumulation.take([ctx.spec], [grad])
        return result, grad, None, None, None


@pytest.fixture(params=["host", "device"])
def programs(group: dist.ProcessGroup, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Of gradients that the host can look at, and of those that are read as a device's are."""
    if request.param == "device":
        monkeypatch.setattr(accumulation, "_is_read_at_once", lambda local: False)
    return Programs(group)


def test_a_device_is_waited_for_once_in_a_backward(group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "_is_read_at_once", lambda local: False, raising=False)
    programs = Programs(group)
    for held, reads in ((True, 0), (True, 1), (False, 1), (False, 0)):
        with Unread() as seen:
            programs.backward("w", "v", by=1.0, held=held)
        assert seen.stacked == reads
    assert programs.grads("w") == programs.grads("v") == [4.0, 4.0]


def test_what_is_held_comes_with_the_next_gradient(programs: Programs) -> None:
    programs.backward("w", by=1.0, held=True)
    assert programs.grads() == [0.0, 0.0]
    assert programs.accumulation.open and programs.accumulation.names == ("w",)
    programs.backward("w", by=2.0, held=True)
    assert programs.grads() == [0.0, 0.0]
    programs.backward("w", by=4.0)
    assert programs.grads() == [7.0, 7.0]
    assert not programs.accumulation.open and programs.accumulation.names == ()
    programs.accumulation.refuse_step()


def test_a_parameter_may_be_in_tiles_here_and_whole_there(group: dist.ProcessGroup) -> None:
    """As one that two frames read, of which one has no product to cut."""
    weight, whole = nn.Parameter(torch.zeros(4)), replace(spec("w"), shape=(4,))
    weight.grad, held = torch.zeros(4), GradientAccumulation({"w": weight})
    comm = GroupCommunicator(group, CPU)
    for number, tile in enumerate(tile_params(whole, 2)):
        held.add([tile], [torch.full((2,), 1.0 + number)], comm)
    held.add([whole], [torch.arange(4.0)], comm)
    held.reduce_held(lambda _: True)
    assert weight.grad.tolist() == [1.0, 2.0, 4.0, 5.0]
    assert held.names == ()


def test_it_adds_to_a_gradient_that_is_there(programs: Programs) -> None:
    programs.backward("w", by=8.0)
    programs.backward("w", by=1.0, held=True)
    assert programs.grads() == [8.0, 8.0]
    programs.backward("w", by=2.0)
    assert programs.grads() == [11.0, 11.0]


def test_what_the_next_backward_does_not_read_is_reduced_at_its_end(programs: Programs) -> None:
    programs.backward("w", "v", by=1.0, held=True)
    programs.backward("v", by=2.0)
    assert (programs.grads("w"), programs.grads("v")) == ([1.0, 1.0], [3.0, 3.0])
    assert programs.accumulation.names == ()


def test_an_uncompiled_backward_ends_it_too(programs: Programs) -> None:
    programs.backward("w", "v", by=1.0, held=True)
    programs.uncompiled("w", by=2.0)
    assert (programs.grads("w"), programs.grads("v")) == ([3.0, 3.0], [1.0, 1.0])


DROPS: list[Callable[[nn.Parameter], object]] = [
    lambda p: setattr(p, "grad", None),
    lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    lambda p: p.grad.mul_(0.0).abs_(),  # type: ignore[union-attr]
    lambda p: torch._foreach_zero_([p.grad]),
    lambda p: setattr(p, "grad", torch.zeros(2)),
]


@pytest.mark.parametrize("drop", DROPS, ids=["none", "zero", "times zero", "foreach", "zeros"])
@pytest.mark.parametrize("before", [0.0, 8.0])
def test_gradients_that_the_user_drops_are_dropped_whole(
    programs: Programs, drop: Callable[[nn.Parameter], object], before: float
) -> None:
    if before:
        programs.backward("w", by=before)
    programs.backward("w", by=1.0, held=True)
    drop(programs.params["w"])
    assert not programs.accumulation.open
    programs.accumulation.refuse_step()
    assert programs.accumulation.names == ()
    programs.backward("w", by=2.0)
    assert programs.grads() == [2.0, 2.0]


CHANGES: list[Callable[[nn.Parameter], object]] = [
    lambda p: p.grad.mul_(0.5),  # type: ignore[union-attr]
    lambda p: p.grad.add_(1.0),  # type: ignore[union-attr]
    lambda p: setattr(p, "grad", p.grad * 0.5),  # type: ignore[operator]
    lambda p: setattr(p, "grad", p.grad.clone()),  # type: ignore[union-attr]
]


@pytest.mark.parametrize("change", CHANGES, ids=["scaled", "added to", "scaled copy", "copy"])
@pytest.mark.parametrize(
    "then",
    [
        lambda programs: programs.accumulation.refuse_step(),
        lambda programs: programs.backward("w", by=2.0, held=True),
        lambda programs: programs.backward("w", by=2.0),
    ],
    ids=["step", "held", "synchronized"],
)
def test_gradients_that_the_user_changes_are_refused(
    programs: Programs, change: Callable[[nn.Parameter], object], then: Callable[[Programs], None]
) -> None:
    """What is held would not be changed with them."""
    programs.backward("w", by=1.0, held=True)
    change(programs.params["w"])
    with pytest.raises(ZeroGraphError, match=r"(?s)the gradient of w was changed while .*hint: change gradients after"):
        then(programs)


def test_a_step_on_a_part_of_the_gradients_is_refused(programs: Programs) -> None:
    programs.backward("w", "v", by=1.0, held=True)
    programs.params["v"].grad = None
    with pytest.raises(ZeroGraphError, match="holds back gradients of 1 parameters, the first of w"):
        programs.accumulation.refuse_step()


def test_a_backward_that_fails_can_be_undone(programs: Programs) -> None:
    programs.backward("w", by=1.0, held=True)
    before = programs.accumulation.state
    programs.accumulation.withdraw(spec("w"))
    assert programs.accumulation.names == ()
    programs.accumulation.state = before
    programs.backward("w", by=2.0)
    assert programs.grads() == [3.0, 3.0]


def test_gradients_that_nobody_asks_for_are_not_held(programs: Programs) -> None:
    """``torch.autograd.grad`` for inputs runs programs that compute gradients of parameters, too."""
    x, loss = programs.read("w", by=4.0)
    with programs.accumulation.holding_back():
        (own,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert own.tolist() == [4.0, 4.0] and programs.accumulation.names == ()
        loss.backward()
    programs.backward("w", by=2.0)
    assert programs.grads() == [6.0, 6.0]


def test_gradients_that_nobody_asks_for_take_no_held_ones(programs: Programs) -> None:
    programs.backward("w", "v", by=1.0, held=True)
    x, loss = programs.read("w", by=4.0)
    torch.autograd.grad(loss, x, retain_graph=True)
    assert set(programs.accumulation.names) == {"w", "v"}
    assert programs.grads("w") == programs.grads("v") == [0.0, 0.0]
    loss.backward()
    assert programs.grads("w") == [5.0, 5.0] and programs.grads("v") == [1.0, 1.0]


def test_gradients_of_parameters_are_returned_where_they_are_reduced(programs: Programs) -> None:
    programs.backward("w", by=1.0, held=True)
    _, loss = programs.read("w", by=4.0)
    (own,) = torch.autograd.grad(loss, programs.params["w"], retain_graph=True)
    assert own.tolist() == [4.0, 4.0] and programs.accumulation.names == ("w",)
    with (
        programs.accumulation.holding_back(),
        pytest.raises(
            UnsupportedError, match=r"(?s)autograd.grad for w, .* while no_sync\(\) .*hint: .*outside of no_s"
        ),
    ):
        torch.autograd.grad(loss, programs.params["w"])
    assert programs.grads() == [0.0, 0.0]


def test_a_parameter_behind_a_function_is_held_like_others(programs: Programs) -> None:
    """``functional_call`` with scaled ones; alone of those that such a function hands on, nobody can tell who asks."""
    doubled = programs.params["w"] * 2
    x, loss = programs.read(doubled, by=4.0)
    with programs.accumulation.holding_back():
        with pytest.raises(UnsupportedError, match=r"autograd.grad for w, or for tensors that it is computed from"):
            torch.autograd.grad(loss, doubled, retain_graph=True)
        for ask in (torch.autograd.grad, lambda loss, x, **keeps: loss.backward(inputs=[x], **keeps)):
            with pytest.raises(UnsupportedError, match=r"(?s)for w, or .*hint: .* or backward\(\)"):
                ask(loss, x, retain_graph=True)
        assert programs.accumulation.names == ()
        loss.backward(retain_graph=True)
        assert programs.accumulation.names == ("w",)
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    assert programs.grads() == [16.0, 16.0]


def test_frozen_since_the_forward(programs: Programs) -> None:
    x, loss = programs.read("w", by=4.0)
    programs.params["w"].requires_grad_(False)
    with programs.accumulation.holding_back():
        loss.backward()
    assert programs.accumulation.names == () and programs.params["w"].grad is None and x.grad is not None


def test_held_gradients_are_summed_in_the_dtype_of_reductions(group: dist.ProcessGroup) -> None:
    """Many small ones are not lost beside a large one, as they would be in bfloat16."""
    low = Param("w", (2,), "bfloat16", "bfloat16", "float32", True, Layout("rows", 1))
    weight, totals = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), list[Tensor]()
    accumulation = GradientAccumulation({"w": weight})
    comm = GroupCommunicator(group, CPU)
    for number in (256.0, 1.0, 1.0):
        (mark,) = accumulation.add([low], [torch.full((2,), number, dtype=torch.bfloat16)], comm)
        assert mark.dtype is torch.bfloat16 and mark.signbit().all() and not mark.any()
    read = weight * 1
    read.register_hook(lambda grad: totals.extend(accumulation.take([low], [grad])))
    read.sum().backward()
    (total,) = totals
    assert (total.dtype, total.tolist()) == (torch.float32, [259.0, 259.0])
