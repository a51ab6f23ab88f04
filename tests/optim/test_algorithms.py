"""The native optimizers go where torch's go, and their state dicts are torch's.

Tests ``optim/algorithm.py``, ``optim/algorithms/adagrad.py``, ``optim/algorithms/adam.py``,
``optim/algorithms/lion.py`` and ``optim/algorithms/sgd.py``.
"""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from optim.training import PAIRS, assert_close, give_gradients, parameters, train
from torch import Tensor, nn

import zerograph
import zerograph.optim as native


@pytest.mark.parametrize("name", PAIRS)
def test_the_trajectory_is_torchs(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    mine, its = parameters(), parameters()
    train(ours(mine, **options), 100)
    train(theirs(its, foreach=False, **options), 100)
    assert_close(mine, its)


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs, options = PAIRS[name]
    reference = parameters()
    train(theirs(reference, **options), 15)
    for first, second in ((ours, theirs), (theirs, ours)):
        params = parameters()
        before, after = first(params, **options), second(params, **options)
        train(before, 5)
        saved = io.BytesIO()
        torch.save(before.state_dict(), saved)
        saved.seek(0)
        after.load_state_dict(torch.load(saved, weights_only=True))
        train(after, 5, start=5)
        before.load_state_dict(copy.deepcopy(after.state_dict()))
        train(before, 5, start=10)
        assert_close(params, reference)
        _assert_same_form(before.state_dict(), after.state_dict())


def _assert_same_form(ours: dict, theirs: dict) -> None:
    assert [list(group) for group in ours["param_groups"]] == [list(group) for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, state in ours["state"].items():
        other = theirs["state"][key]
        assert list(state) == list(other)
        for name, value in state.items():
            assert (value.shape, value.dtype) == (other[name].shape, other[name].dtype)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_what_torch_does_on_devices_changes_nothing_on_the_host(options: dict) -> None:
    mine, its = parameters(), parameters()
    optimizer = native.AdamW(mine, lr=0.01, **options)
    train(optimizer, 5)
    other = torch.optim.AdamW(its, lr=0.01)
    train(other, 5)
    assert_close(mine, its)
    state = optimizer.state_dict()
    assert state["param_groups"][0] == other.state_dict()["param_groups"][0] | options
    other.load_state_dict(state)


def test_lion_is_the_papers() -> None:
    mine, its = parameters(), parameters()
    moments = [torch.zeros_like(p) for p in its]
    optimizer = native.Lion(mine, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)
    train(optimizer, 50)
    for step in range(50):
        give_gradients(its, step)
        with torch.no_grad():
            for p, m in zip(its, moments, strict=True):
                p.mul_(1 - 0.01 * 0.1).sub_(torch.sign(0.9 * m + 0.1 * p.grad), alpha=0.01)
                m.mul_(0.98).add_(p.grad, alpha=0.02)
    assert_close(mine, its)
    assert set(optimizer.state_dict()["state"][0]) == {"exp_avg"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alone(copied) -> None:
    params = parameters()
    optimizer = native.AdamW(params, lr=0.01, moments=torch.bfloat16)
    train(optimizer, 3)
    before = [p.detach().clone() for p in params]
    other = copied(optimizer)
    train(other, 3, start=3)
    assert_close(params, before, 0, 0)
    train(optimizer, 3, start=3)
    assert_close(other.param_groups[0]["params"], params, 0, 0)
    assert other.moments is torch.bfloat16
    assert isinstance(other, torch.optim.AdamW)


def test_groups_and_schedulers() -> None:
    def trained(cls: type) -> list[Tensor]:
        params = parameters()
        groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:3], "weight_decay": 0.5, "betas": (0.5, 0.6)}]
        optimizer = cls(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30, cycle_momentum=True)
        for step in range(20):
            if step == 5:
                optimizer.add_param_group({"params": params[3:]})
                for key in ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"):
                    optimizer.param_groups[2][key] = optimizer.param_groups[1][key]
            train(optimizer, 1, step)
            for group in optimizer.param_groups[:2]:
                assert group["lr"] != 0.01
            if step < 5:
                schedule.step()
        return params

    assert_close(trained(native.AdamW), trained(torch.optim.AdamW))


def test_parameters_without_gradient_are_left_alone_and_have_no_state() -> None:
    mine, its = parameters(), parameters()
    ours, theirs = native.Adam(mine, lr=0.1), torch.optim.Adam(its, lr=0.1)
    for step, missing in enumerate([(0, 1), (1, 2), (2,), (0, 1, 2, 3, 4), (), (1,)]):
        for params, optimizer in ((mine, ours), (its, theirs)):
            give_gradients(params, step)
            for i in missing:
                params[i].grad = None
            optimizer.step()
        assert ours.state_dict()["state"].keys() == theirs.state_dict()["state"].keys()
    assert_close(mine, its)
    assert [float(ours.state[p]["step"]) for p in mine] == [float(theirs.state[p]["step"]) for p in its]


def test_a_closure_is_evaluated_with_gradients() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = native.SGD([param], lr=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert torch.equal(param.detach(), torch.zeros(3))


@pytest.mark.parametrize("change", ["data", "state tensor", "state cleared", "state data", "group list", "dtype"])
def test_what_is_put_elsewhere_is_found_again(change: str) -> None:
    def trained(cls: type) -> list[Tensor]:
        params = parameters()
        optimizer = cls(params, lr=0.1)
        train(optimizer, 3)
        first = params[0]
        match change:
            case "data":
                first.data = first.data.clone() + 1
            case "state tensor":
                optimizer.state[first]["exp_avg"] = torch.ones_like(first)
            case "state cleared":
                optimizer.state.clear()
            case "state data":
                optimizer.state[first]["exp_avg"].data = torch.ones_like(first)
            case "group list":
                optimizer.param_groups[0]["params"] = [nn.Parameter(p.detach() + 1) for p in params]
            case "dtype":
                first.grad = None
                first.data = first.data.to(torch.float32).reshape(5, 3)
                for name in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[first][name] = optimizer.state[first][name].reshape(5, 3)
        train(optimizer, 3, start=3)
        return params + optimizer.param_groups[0]["params"]

    assert_close(trained(native.Adam), trained(torch.optim.Adam))


def test_layouts_in_memory() -> None:
    """Parameters in channels_last, gradients in another order than their parameters."""

    def trained(cls: type) -> list[Tensor]:
        torch.manual_seed(0)
        params = [
            nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
            nn.Parameter(torch.randn(3, 5)),
        ]
        optimizer = cls(params, lr=0.1)
        for _ in range(4):
            params[0].grad = torch.randn(4, 3, 2, 2)
            params[1].grad = torch.randn(5, 3).t()
            optimizer.step()
        return params

    assert_close(trained(native.AdamW), trained(torch.optim.AdamW))


@pytest.mark.parametrize("name", ["adam", "sgd momentum", "sgd"])
def test_gradients_that_come_and_go_do_not_gather_addresses_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, options = PAIRS[name]
    mine, its = parameters(), parameters()
    optimizer, other = ours(mine, **options), theirs(its, **options)
    sets, made = zerograph._core.TensorSet, []
    monkeypatch.setattr(zerograph._core, "TensorSet", lambda *args: made.append(1) or sets(*args))
    for step in range(20):
        for params, which in ((mine, optimizer), (its, other)):
            give_gradients(params, step)
            for i, p in enumerate(params):
                if (step >> i) % 2 == 0:
                    p.grad = None
            which.step()
    assert_close(mine, its)
    assert len(made) == len(mine)
    assert optimizer.state_dict()["state"].keys() == other.state_dict()["state"].keys()
