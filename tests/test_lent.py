"""Full copies that code outside of any graph reads: writing into one is an error, reading and holding one is none."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from toy import Toy, adamw, build, compiled, differing, full, train

import zerograph
from zerograph import lent
from zerograph.core.errors import ShardingError


def _fill(model: Toy) -> None:
    with torch.no_grad():
        model.up.weight.fill_(0)


def _data(model: Toy) -> None:
    model.up.weight.data.mul_(2)


def _init(model: Toy) -> None:
    nn.init.zeros_(model.up.weight)


def _view(model: Toy) -> None:
    with torch.no_grad():
        model.up.weight[2:].t().add_(1)


def _inference(model: Toy) -> None:
    with torch.inference_mode():
        model.up.weight.zero_()


EDITS = (_fill, _data, _init, _view, _inference)


def _read(model: Toy, _: Any) -> None:
    model.up.weight


def _call(model: Toy, _: Any) -> None:
    model(torch.arange(4))


def _step(_: Toy, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


def _save(model: Toy, _: Any) -> None:
    model.state_dict()


NOTICED = (_read, _call, _step, _save)


def _refused(stage: int) -> None:
    model = build()
    optimizer = adamw(model)
    compiled(model, stage)
    train(model, optimizer, range(1))
    before = full(model)
    for edit in EDITS:
        _is_refused(edit, _call, model, optimizer)
    for notice in NOTICED:
        _is_refused(_fill, notice, model, optimizer)
    held = model.up.weight
    model(torch.arange(4))
    with torch.no_grad():
        held.zero_()
    with pytest.raises(ShardingError, match="the change is lost"):
        model(torch.arange(4))
    with pytest.raises(ShardingError, match="assigned"):  # at once
        model.up.weight.data = torch.zeros(8, 4)
    assert all(torch.equal(value, before[name]) for name, value in full(model).items())


def _is_refused(edit: Callable[[Toy], None], notice: Callable[..., None], model: Toy, optimizer: Any) -> None:
    edit(model)
    with pytest.raises(ShardingError, match=r"up.weight is sharded.*test_lent.py:\d+ read.*(?s:.*)writeback=True"):
        notice(model, optimizer)
    notice(model, optimizer)  # it is told once


@pytest.mark.parametrize("stage", [3, 0])
def test_an_edit_of_a_copy_is_refused_at_the_next_look(stage: int) -> None:
    run(2, _refused, stage)


def _reads() -> None:
    model = build()
    compiled(model, 1)
    train(model, adamw(model), range(1))
    before = full(model)
    held = model.up.weight
    weight = model.up.weight.data.clone().mul_(2)  # the user's own
    assert torch.equal(weight, 2 * held.detach()) and type(held) is type(model.up.weight.data) is Tensor
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert model.up.weight.norm() > 0 and model.forward(torch.arange(4)).shape == (4, 9)
    with torch.no_grad():
        copies = (
            copy.deepcopy(model.up.weight),
            _saved(model.up.weight),
            copy.deepcopy(model.up.weight.data),
        )
    assert all(type(c) is Tensor and torch.equal(c, held) for c in copies)
    model.forward(torch.arange(4)).sum().backward()
    del held
    _memory(model)
    assert differing(full(model), before) == []


def _saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)  # type: ignore[no-any-return]


def _memory(model: Toy) -> None:
    """Copies die with their last holder, and of many that were read no more than the last is remembered."""
    lent.refuse_lost_edits()
    gc.disable()  # nothing may wait for it
    for _ in range(50):
        for module in (model.up, model.down):
            module.weight.sum()
    (one, other) = [loan for loans in lent._LOANS.values() for loan in loans]
    gc.enable()
    assert one.copy() is other.copy() is None
    assert one.probe.untyped_storage().nbytes() == other.probe.untyped_storage().nbytes() == 0
    model(torch.arange(4))
    assert not lent._LOANS


def test_reading_a_copy_is_no_error() -> None:
    run(2, _reads)


def test_copies_are_read_in_functorch_as_elsewhere() -> None:
    model = nn.Linear(4, 4)
    zerograph.shard(model, zerograph.backend(stage=3, dtype=torch.bfloat16, compute="eager"))
    x = torch.ones(4, dtype=torch.bfloat16)
    assert torch.equal(torch.func.grad(lambda x: model(x).sum())(x), model.weight.sum(0))


class Skipped(nn.Module):
    """A break in a loop: Dynamo skips ``forward``, whose copies then are inputs of the frames that it does compile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = _times(x, self.weight)
        return x


def _times(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)


def _inputs() -> None:
    model, plain = Skipped(), Skipped()
    backend = zerograph.backend(stage=3, compute="eager")
    zerograph.shard(model, backend)
    expected = plain(torch.ones(2, 4))
    expected.sum().backward()
    model.compile(backend=backend)
    found = model(torch.ones(2, 4))
    found.sum().backward()
    assert backend.frames and torch.equal(found, expected)
    grad = model.get_parameter("weight").grad
    assert torch.allclose(grad.full_tensor(), plain.weight.grad)


def test_a_copy_may_be_an_input_of_a_compiled_frame() -> None:
    run(2, _inputs)


def _outward() -> None:
    model = build()
    compiled(model, 2)
    model(torch.arange(4)).sum().backward()
    weight, seen = model.get_parameter("up.weight"), []
    assert model.up.weight.grad is weight.grad is not None
    if dist.get_rank() == 0:  # no collective hides in any of these
        assert model.up.weight.shape == (8, 4) and model.up.weight.numel() == 32
    with torch.no_grad():
        assert model.up.weight.requires_grad and not model.up.bias.requires_grad
    model.up.weight.grad = None
    assert weight.grad is None
    model.up.weight.register_hook(lambda grad: seen.append(grad.shape))
    model(torch.arange(4)).sum().backward()
    assert seen == [weight.shape]
    model.up.weight.requires_grad = False
    getattr(model.down, "weight").requires_grad_(False)  # noqa: B009  as loops over names do
    model.zero_grad()
    model(torch.arange(4)).sum().backward()
    assert weight.grad is model.down.weight.grad is None and model.down.bias.grad is not None


def test_what_only_the_parameter_knows_is_asked_of_it() -> None:
    run(2, _outward)
