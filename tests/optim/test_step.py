"""What one step does beside the update: unscale, clip, skip, tell autograd, refuse.

Tests ``optim/clip.py``, ``optim/factor.py``, ``optim/host.py`` and ``optim/update.py``.
"""

from __future__ import annotations

import logging
import math
import warnings

import pytest
import torch
from graphs import fake_world
from optim.training import assert_close, give_gradients, parameters, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from waits import DEVICE, NoWaits

import zerograph
import zerograph._core as _core
import zerograph.optim as native
from zerograph.core.errors import CheckpointError, ConfigError, UnsupportedError
from zerograph.optim import host
from zerograph.runtime.torch_private import as_dtensor


@pytest.mark.parametrize("scale", [None, 1024.0, torch.tensor(1024.0)], ids=str)
@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_unscaling_and_clipping_in_the_step(scale: float | None, clip: float | None) -> None:
    mine, its = parameters(), parameters()
    ours, theirs = native.AdamW(mine, lr=0.01), torch.optim.AdamW(its, lr=0.01)
    for step in range(10):
        give_gradients(mine, step, float(scale or 1.0))
        before = [p.grad.clone() for p in mine]
        ours.step(grad_scale=scale, clip=clip)
        assert_close([p.grad for p in mine], before, 0, 0)
        give_gradients(its, step)
        norm = torch.nn.utils.clip_grad_norm_(its, clip or math.inf)
        assert ours.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        theirs.step()
    assert_close(mine, its)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("cls", [native.AdamW, native.SGD, native.Adagrad, native.Lion])
def test_a_gradient_that_is_not_finite_skips_the_step(cls: type, bad: float) -> None:
    mine, its = parameters(), parameters()
    ours, theirs = cls(mine, lr=0.01), cls(its, lr=0.01)
    for step in range(3):
        give_gradients(mine, 50 + step)
        mine[1].grad[3] = bad
        assert ours.step() is None
        assert not math.isfinite(ours.grad_norm)
        assert ours.skipped == step + 1
        train(ours, 1, step)
        train(theirs, 1, step)
    assert_close(mine, its, 0, 0)
    assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()


def test_values_that_are_not_finite_go_through_if_asked_to() -> None:
    mine, its = parameters(), parameters()
    ours, theirs = native.AdamW(mine, lr=0.01, skip_nonfinite=False), torch.optim.AdamW(its, lr=0.01)
    for params, optimizer in ((mine, ours), (its, theirs)):
        give_gradients(params, 0)
        params[1].grad[3] = math.nan
        optimizer.step()
    torch.testing.assert_close([p.detach() for p in mine], [p.detach() for p in its], equal_nan=True)
    assert math.isnan(ours.grad_norm), "no norm was taken"
    assert ours.skipped == 0


@pytest.mark.parametrize("unscaled", [False, True])
def test_grad_scaler(unscaled: bool) -> None:
    mine, its = parameters(), parameters()
    ours, theirs = native.AdamW(mine, lr=0.01), torch.optim.AdamW(its, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    done = 0
    for step in range(10):
        give_gradients(mine, step, scaler.get_scale())
        scaler.scale(torch.ones(()))
        bad = step in (2, 7)
        if bad:
            mine[0].grad[1, 1] = math.inf
        if unscaled:
            scaler.unscale_(ours)
            zerograph.clip_grad_norm_(mine, 0.5)
        before = scaler.get_scale()
        scaler.step(ours)
        scaler.update()
        assert (scaler.get_scale() < before) == bad
        if not bad:
            give_gradients(its, step)
            if unscaled:
                torch.nn.utils.clip_grad_norm_(its, 0.5)
            theirs.step()
            done += 1
    assert_close(mine, its)
    assert float(ours.state[mine[0]]["step"]) == done == 8
    assert ours.skipped == 2


@pytest.mark.parametrize("refused", ["in the step", "before it"])
def test_a_step_that_raises_leaves_no_scale_behind(refused: str) -> None:
    """``GradScaler`` takes back what it sets only after a step that returned, and multiplies with what it finds."""
    backend = zerograph.backend()  # its checks are hooks before steps, as this one
    param = nn.Parameter(torch.ones(4))
    optimizer, scaler = native.SGD([param], lr=0.5), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(param.sum()).backward()
    hook = optimizer.register_step_pre_hook(_raises) if refused == "before it" else None
    with pytest.raises(ConfigError if hook is None else ZeroDivisionError):
        scaler.step(optimizer, clip=0.0)
    if hook is not None:
        hook.remove()
    scaler.step(optimizer)
    assert param.tolist() == [0.5] * 4
    del backend


def _raises(*_: object) -> None:
    raise ZeroDivisionError


def test_autograd_notices_the_update() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = native.SGD([weight], lr=0.1)
    loss = (weight.square() * torch.ones(3, requires_grad=True)).sum()
    weight.grad = torch.ones(3)
    version = weight._version
    optimizer.step()
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    untouched = weight._version
    weight.grad = None
    optimizer.step()
    assert weight._version == untouched


def test_hundreds_of_parameters_are_one_native_call(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters(shapes=[(5,)] * 300)
    groups = [{"params": params[:200]}, {"params": params[200:], "lr": 0.1}]
    optimizer = native.AdamW(groups, skip_nonfinite=False)
    train(optimizer, 1)
    calls = []
    core = zerograph._core
    real, sets = core.update, core.TensorSet
    monkeypatch.setattr(core, "update", lambda groups, factor: calls.append(len(groups)) or real(groups, factor))
    monkeypatch.setattr(core, "TensorSet", lambda *args: pytest.fail("addresses were gathered again") or sets(*args))
    train(optimizer, 3, start=1)
    assert calls == [2, 2, 2]


def _param(value: torch.Tensor, grad: torch.Tensor | None = None) -> nn.Parameter:
    param = nn.Parameter(value)
    param.grad = grad if grad is not None else torch.ones_like(param)
    return param


REFUSED = {
    "sparse gradient": (lambda: _param(torch.ones(3), torch.ones(3).to_sparse()), "layout torch.sparse_coo"),
    "complex": (lambda: _param(torch.ones(3, dtype=torch.complex64)), "complex"),
    "float64": (lambda: _param(torch.ones(3, dtype=torch.float64)), "torch.float64"),
    "part of a larger tensor": (lambda: _param(torch.ones(4, 4)[:, :2]), "strides"),
    "meta": (lambda: _param(torch.ones(3, device="meta")), "meta device"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("skip", [True, False])
def test_what_no_kernel_can_update_is_refused(kind: str, skip: bool) -> None:
    make, reason = REFUSED[kind]
    good = _param(torch.ones(3))
    optimizer = native.AdamW([("good", good), ("bad.weight", make())], skip_nonfinite=skip)
    with pytest.raises(UnsupportedError, match=reason) as failure:
        optimizer.step()
    assert "parameter bad.weight" in str(failure.value)
    assert failure.value.hint
    assert torch.equal(good.detach(), torch.ones(3))


def test_a_parameter_that_changed_its_shape() -> None:
    param = _param(torch.ones(3))
    optimizer = native.AdamW([param])
    optimizer.step()
    param.grad = None
    param.data = torch.ones(4)
    param.grad = torch.ones(4)
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 of its group has shape \(3,\)"):
        optimizer.step()


def test_wrong_arguments() -> None:
    optimizer = native.AdamW([_param(torch.ones(3))])
    with pytest.raises(ConfigError, match="clip=0"):
        optimizer.step(clip=0)
    with pytest.raises(ConfigError, match="grad_scale"):
        optimizer.step(grad_scale=0.0)
    with pytest.raises(UnsupportedError, match="differentiable"):
        native.SGD(parameters(), differentiable=True)
    with pytest.raises(ConfigError, match="Lion"):
        native.Lion(parameters(), betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        native.AdamW(parameters(), lr=-1.0)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_clip_grad_norm(norm_type: float, dtype: torch.dtype) -> None:
    mine, its = parameters(dtype), parameters(dtype)
    give_gradients(mine, 0)
    give_gradients(its, 0)
    del its[3]  # torch knows no infinity norm of nothing
    ours = zerograph.clip_grad_norm_(mine, 0.5, norm_type)
    theirs = torch.nn.utils.clip_grad_norm_(its, 0.5, norm_type)
    assert ours.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert_close([p.grad for p in mine if p.numel()], [p.grad for p in its], tolerance, tolerance)


@pytest.mark.parametrize("norm_type", [2.0, 3.0, math.inf])
@pytest.mark.parametrize("world", [1, 2])
def test_clipping_waits_for_no_device(world: int, norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole gradients, and of those that are split over ranks; of two dtypes, and empty ones."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)  # the meta device has none
    params = [nn.Parameter(p.to(DEVICE)) for p in (*parameters(), *parameters(torch.bfloat16))]
    with fake_world(0, 2):
        mesh = DeviceMesh("cpu", [0, 1])
        if world == 2:
            # A scalar has no rows to split; torch 2.14 refuses one that is said to.
            places: list[Placement] = [Shard(0) if p.ndim else Replicate() for p in params]
            pairs = zip((p.detach() for p in params), places, strict=True)
            params = [nn.Parameter(as_dtensor(p, mesh, [at], p.shape, p.stride())) for p, at in pairs]
        for p in params:
            p.grad = p.detach()
        with NoWaits():
            assert zerograph.clip_grad_norm_(params, 0.5, norm_type).device == DEVICE


def test_a_step_beside_python() -> None:
    mine, its = parameters(), parameters()
    ours, theirs = native.AdamW(mine, lr=0.01), native.AdamW(its, lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(ours, 100)
    hooked = []
    ours.register_step_pre_hook(lambda *_: hooked.append("before"))
    ours.register_step_post_hook(lambda *_: hooked.append("after"))
    for step in range(5):
        give_gradients(mine, step)
        update = ours.start_step(clip=1.0)
        if step % 2:
            update.wait()
            assert update.done()
        del update
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            schedule.step()
        ours.zero_grad(set_to_none=False)
        give_gradients(its, step)
        theirs.step(clip=1.0)
    assert_close(mine, its, 0, 0)
    assert hooked == ["before", "after"] * 5
    give_gradients(mine, 5)
    ours.start_step()
    state = ours.state_dict()
    assert float(state["state"][0]["step"]) == 6


def test_the_kernels_in_use_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    host._tell_target.cache_clear()
    with caplog.at_level(logging.INFO, logger="zerograph"):
        for _ in range(2):
            weight = nn.Parameter(torch.zeros(4))
            weight.grad = torch.ones(4)
            optimizer = zerograph.optim.SGD([weight], lr=1.0)
            for _ in range(2):
                optimizer.step()
    threads = _core.pool_threads()
    assert [r.message for r in caplog.records] == [f"optimizer kernels for {_core.simd_target()} on {threads} threads"]
