"""What lies on a device is updated by torch's kernels, which work on a CPU too: here they do all of it."""

from __future__ import annotations

import math

import pytest
import torch
from optim.training import PAIRS, assert_close, give_gradients, parameters, train

import zerograph.optim as native
from zerograph.core.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensors", "parts", "host"):
        monkeypatch.setattr(f"zerograph.optim.{module}.uses_kernels", lambda local: local.ndim == 3)


@pytest.mark.parametrize("name", PAIRS)
def test_a_group_of_two_devices(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    mine, its = parameters(), parameters()
    optimizer, other = ours(mine, **options), theirs(its, **options)
    for step in range(10):
        give_gradients(mine, step, 8.0)
        give_gradients(its, step)
        if step in (0, 4):  # the first momentum comes at different times
            mine[0].grad = its[0].grad = None
        optimizer.step(grad_scale=8.0, clip=1.0)
        norm = torch.nn.utils.clip_grad_norm_(its, 1.0)
        assert optimizer.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        other.step()
    assert_close(mine, its)
    other.load_state_dict(optimizer.state_dict())
    train(other, 2, start=10)
    optimizer.load_state_dict(other.state_dict())
    train(optimizer, 2, start=12)


def test_lion_on_two_devices_is_lion_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for _ in range(2):
        params = parameters()
        train(native.Lion(params, lr=0.01, weight_decay=0.1, maximize=True), 10, grad_scale=3.0)
        ends.append(params)
        monkeypatch.undo()
    assert_close(*ends)


@pytest.mark.parametrize("cls", [native.AdamW, native.SGD, native.Adagrad, native.Lion])
def test_masters(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = []
    for _ in range(2):
        params = parameters(torch.bfloat16)
        optimizer = cls(params, lr=1e-3, master=torch.float32)
        train(optimizer, 10)
        ends.append([optimizer.state[p]["master"] for p in params])
        assert_close(params, [m.bfloat16() for m in ends[-1]], 0, 0)
        monkeypatch.undo()
    assert_close(*ends)


def test_steps_are_skipped_there_too() -> None:
    params = parameters()
    optimizer = native.AdamW(params, lr=0.1)
    give_gradients(params, 0)
    params[0].grad[0, 0] = math.nan
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_close(params, before, 0, 0)
    assert optimizer.skipped == 1 and not optimizer.state


def test_moments_that_torch_cannot_keep() -> None:
    params = parameters()
    give_gradients(params, 0)
    with pytest.raises(UnsupportedError, match=r"moments=torch\.bfloat16 for torch\.float32 on cpu"):
        native.AdamW(params, moments=torch.bfloat16).step()
