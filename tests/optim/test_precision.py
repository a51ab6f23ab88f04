"""Masters and moments of another precision than the parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from optim.training import assert_close, give_gradients, give_wide_gradients, parameters, train
from torch import Tensor

import zerograph.optim as native
from zerograph.core.errors import ConfigError

LOW = [torch.bfloat16, torch.float16]


def _reference(dtype: torch.dtype, steps: int, lr: float = 1e-3) -> list[Tensor]:
    """AdamW in float32 on gradients that were rounded to ``dtype``."""
    params = [p.detach().float().requires_grad_() for p in parameters(dtype)]
    optimizer = torch.optim.AdamW(params, lr=lr)
    for step in range(steps):
        rounded = parameters(dtype)
        give_gradients(rounded, step)
        for p, r in zip(params, rounded, strict=True):
            p.grad = r.grad.float()
        optimizer.step()
    return params


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_masters_keep_what_rounding_loses(dtype: torch.dtype) -> None:
    params, reference = parameters(dtype), _reference(dtype, 100)
    optimizer = native.AdamW(params, lr=1e-3, master=torch.float32)
    train(optimizer, 100)
    masters = [optimizer.state[p]["master"] for p in params]
    assert_close(masters, reference)
    assert_close(params, [m.to(dtype) for m in masters], 0, 0)


@pytest.mark.parametrize("cls", [native.SGD, native.Adagrad, native.Lion, native.Adam])
def test_every_algorithm_has_masters(cls: type) -> None:
    params, wide = parameters(torch.bfloat16), [p.detach().float().requires_grad_() for p in parameters(torch.bfloat16)]
    optimizer, reference = cls(params, lr=1e-3, master=torch.float32), cls(wide, lr=1e-3, master=torch.float32)
    for step in range(5):
        give_wide_gradients(params, wide, step)
        optimizer.step()
        reference.step()
    assert_close([optimizer.state[p]["master"] for p in params], wide, 0, 0)
    assert "master" not in reference.state[wide[0]]


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_without_masters(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = native.AdamW(params, lr=0.01)
    train(optimizer, 20)
    assert_close([p.float() for p in params], _reference(dtype, 20, lr=0.01), 0.05, 0.05)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, *LOW], ids=str)
def test_moments_in_bfloat16(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = native.AdamW(params, lr=1e-3, moments=torch.bfloat16, master=torch.float32)
    train(optimizer, 20)
    state = optimizer.state[params[0]]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    ours = [optimizer.state[p].get("master", p) for p in params]
    assert_close(ours, _reference(dtype, 20), 0, 2e-3)


def test_a_state_dict_keeps_its_precision() -> None:
    """torch rounds state to the parameter's dtype when it loads."""
    params = parameters(torch.bfloat16)
    first = native.AdamW(params, lr=1e-3, master=torch.float32)
    train(first, 5)
    saved, values = copy.deepcopy(first.state_dict()), [p.detach().clone() for p in params]
    train(first, 5, start=5)
    again = [torch.nn.Parameter(v) for v in values]
    second = native.AdamW(again, lr=1e-3, master=torch.float32)
    second.load_state_dict(saved)
    train(second, 5, start=5)
    assert_close([second.state[p]["master"] for p in again], [first.state[p]["master"] for p in params], 0, 0)


def test_torchs_state_gets_masters_and_ours_goes_back() -> None:
    params = parameters(torch.bfloat16)
    theirs = torch.optim.AdamW(params, lr=1e-3)
    train(theirs, 3)
    ours = native.AdamW(params, lr=1e-3, master=torch.float32)
    ours.load_state_dict(theirs.state_dict())
    train(ours, 3, start=3)
    state = ours.state[params[0]]
    assert {name: v.dtype for name, v in state.items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
    theirs.load_state_dict(ours.state_dict())
    train(theirs, 1, start=6)


@pytest.mark.parametrize("given", [False, True], ids=["unseen", "given"])
def test_a_change_through_data_counts_where_the_version_does(given: bool) -> None:
    """As docs/guide/optimizers.md says: otherwise the next step writes the master over it."""
    (param,) = params = parameters(torch.bfloat16)[:1]
    optimizer = native.SGD(params, lr=1e-4, master=torch.float32)
    train(optimizer, 3)
    before = optimizer.state[param]["master"].clone()
    param.data[0] = 7.0
    if given:
        torch.autograd.graph.increment_version(param)
        before[0] = 7.0
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert_close([optimizer.state[param]["master"]], [before], 0, 0)
    assert_close([param], [before.to(param.dtype)], 0, 0)


def test_a_parameter_changed_by_hand_counts() -> None:
    params = parameters(torch.bfloat16)
    optimizer = native.SGD(params, lr=1e-4, master=torch.float32)
    train(optimizer, 3)
    masters = [optimizer.state[p]["master"].clone() for p in params]
    with torch.no_grad():
        params[0][0] = 7.0
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    masters[0][0] = 7.0
    assert_close([optimizer.state[p]["master"] for p in params], masters, 0, 0)


def test_gradients_wider_than_their_parameters() -> None:
    param = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    param.grad_dtype = None
    param.grad = torch.full((5,), 1.0 + 2**-12)
    native.SGD([param], lr=1.0, master=torch.float32).step()
    assert param.tolist() == [-(2.0**-12)] * 5


def test_wrong_precisions() -> None:
    with pytest.raises(ConfigError, match=r"master=torch\.bfloat16"):
        native.AdamW(parameters(), master=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"moments=torch\.float16"):
        native.AdamW(parameters(), moments=torch.float16)
    with pytest.raises(ConfigError, match="amsgrad"):
        native.AdamW(parameters(), moments=torch.bfloat16, amsgrad=True)


@pytest.mark.parametrize("master", [None, torch.float32], ids=["alone", "master"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_what_adagrad_starts_from_is_not_rounded(dtype: torch.dtype, master: torch.dtype | None) -> None:
    """Neither 0.1 nor 1e-9 is a number of 16 bits, and the latter is zero in float16."""
    for value in (0.1, 1e-9):
        params = parameters(dtype)
        wide = [p.detach().float().requires_grad_() for p in params]
        optimizer, reference = (
            native.Adagrad(p, lr=0.01, initial_accumulator_value=value, master=m)
            for p, m in ((params, master), (wide, None))
        )
        for step in range(3):
            give_gradients(params, step)
            for w, p in zip(wide, params, strict=True):
                w.grad = p.grad.float()
            optimizer.step()
            reference.step()
            if master is None:
                for w, p in zip(wide, params, strict=True):
                    w.data.copy_(p)
            sums = [[o.state[p]["sum"] for p in group] for o, group in ((optimizer, params), (reference, wide))]
            if master is not None or step == 0:
                assert_close(*sums, 0, 0)
