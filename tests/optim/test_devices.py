"""What lies on a device is updated by torch's kernels, which work on a CPU too: here they do all of it."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import pytest
import torch
from optim.training import PAIRS, assert_close, give_gradients, parameters, train
from torch import nn
from waits import DEVICE, NoWaits, Unread

import zerograph.optim as native
from zerograph.core.errors import UnsupportedError
from zerograph.optim.tensors import GroupLayout


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("tensors", "parts", "states", "factor"):
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


ELSEWHERE = [(3, 5), (17,), (), (0, 4)]
KINDS: dict[str, tuple[type, dict[str, Any], torch.dtype]] = {
    "adamw": (native.AdamW, {}, torch.float32),
    "adam amsgrad": (native.Adam, {"amsgrad": True}, torch.float32),
    "masters": (native.AdamW, {"master": torch.float32}, torch.bfloat16),
    "momentum": (native.SGD, {"momentum": 0.9}, torch.float32),
    "adagrad": (native.Adagrad, {"skip_nonfinite": False}, torch.float32),
    "lion": (native.Lion, {"skip_nonfinite": False}, torch.float32),
}
"""Adagrad and Lion have no kernel that skips."""


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_waits_for_a_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the first, which is given nothing to decide here: values of the meta device cannot be read."""
    monkeypatch.setattr(GroupLayout, "_check", _take_dtype)  # refuses the meta device
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)  # unknown there
    cls, options, dtype = KINDS[kind]
    params = [nn.Parameter(p.detach().to(DEVICE)) for p in parameters(dtype, ELSEWHERE)]
    optimizer = cls(params, lr=0.1, **{**options, "skip_nonfinite": False})
    for step in range(4):
        optimizer.skip_nonfinite = options.get("skip_nonfinite", step > 0)
        for p in params:
            p.grad = torch.empty_like(p)
        asked = ({}, {"clip": 1.0}, {"clip": 1.0, "grad_scale": torch.ones((), device=DEVICE)}, {"grad_scale": 8.0})
        with NoWaits():
            optimizer.step(**asked[step])


def _take_dtype(layout: GroupLayout, index: int, grad: torch.Tensor) -> None:
    layout.dtypes[index] = grad.dtype
    layout.changes += 1


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("scaled", [False, True], ids=["norm", "GradScaler"])
def test_a_device_decides_for_itself(kind: str, scaled: bool) -> None:
    """As the host does, which reads what was decided when it is asked for."""
    cls, options, dtype = KINDS[kind]
    mine, its = parameters(dtype, ELSEWHERE), parameters(dtype, ELSEWHERE)
    optimizer, other = cls(mine, lr=0.1, **options), cls(its, lr=0.1, **options)
    for step in range(6):
        bad = step in (2, 4)
        give_gradients(mine, step, 8.0)
        mine[0].grad[0, 0] = math.nan if bad else 1.0
        if scaled:
            optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(bad)), torch.tensor(8.0)
        with Unread() if step else contextlib.nullcontext():
            optimizer.step(clip=0.5, grad_scale=None if scaled else 8.0)
        assert math.isfinite(optimizer.grad_norm) is not bad
        if not bad:
            give_gradients(its, step)
            its[0].grad[0, 0] = 1.0 / 8.0
            other.step(clip=0.5)
            assert optimizer.grad_norm == pytest.approx(other.grad_norm)
    assert_close(mine, its)
    assert optimizer.skipped == 2
    assert copy.deepcopy(optimizer).skipped == 2


def test_a_scaler_that_found_no_gradient() -> None:
    """``GradScaler`` then sets ``found_inf`` to the number 0. It asks for gradients of one optimizer only."""
    params, others = parameters(torch.float32, ELSEWHERE), parameters()
    optimizer, other = native.AdamW(params, lr=0.1), native.SGD(others, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    for step in range(3):
        give_gradients(others, step, 8.0)
        if step != 1:
            give_gradients(params, step, 8.0)
        before = params[0].detach().clone()
        scaler.step(optimizer)
        scaler.step(other)
        scaler.update()
        assert torch.equal(params[0], before) is (step == 1)
        optimizer.zero_grad()
    assert optimizer.skipped == 0


def test_moments_that_torch_cannot_keep() -> None:
    params = parameters()
    give_gradients(params, 0)
    with pytest.raises(UnsupportedError, match=r"moments=torch\.bfloat16 for torch\.float32 on cpu"):
        native.AdamW(params, moments=torch.bfloat16).step()
