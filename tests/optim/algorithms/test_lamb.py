"""LAMB is the paper's on one process, and on several ranks the same, wherever parameters and states live."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from numerics.test_offload import Run, _each_equal, _resumed, _same
from optim.training import assert_close, give_gradients, give_wide_gradients, parameters, train
from ranks import run
from torch import Tensor, nn
from torch.optim import Optimizer

import zerograph.optim as native
from zerograph.core.errors import ConfigError
from zerograph.optim.algorithms import lamb as module


class Plain(Optimizer):
    """Algorithm 2 of the paper, with bias correction, tensor by tensor."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, *group["betas"], group)

    def _update(self, p: Tensor, grad: Tensor, beta1: float, beta2: float, group: dict[str, Any]) -> None:
        state = self.state[p]
        count = state["step"] = state.get("step", 0) + 1
        m = state["m"] = beta1 * state.get("m", torch.zeros_like(p)) + (1 - beta1) * grad
        v = state["v"] = beta2 * state.get("v", torch.zeros_like(p)) + (1 - beta2) * grad**2
        update = (m / (1 - beta1**count)) / ((v / (1 - beta2**count)).sqrt() + group["eps"]) + group["weight_decay"] * p
        weight, size = p.norm(), update.norm()
        p -= group["lr"] * (weight / size if weight > 0 and size > 0 else 1.0) * update


def _start(params: Sequence[Tensor]) -> Sequence[Tensor]:
    """One is all zeros, and has no ratio."""
    with torch.no_grad():
        params[0].zero_()
    return params


@pytest.mark.parametrize("options", [{}, {"lr": 0.02, "betas": (0.8, 0.9), "weight_decay": 0.0, "eps": 1e-3}])
def test_the_trajectory_is_the_papers(options: dict[str, Any]) -> None:
    mine, its = _start(parameters()), _start(parameters())
    ours = native.LAMB(mine, **options)
    train(ours, 50)
    train(Plain(its, **options), 50)
    assert_close(mine, its, 0, 1e-6)
    assert list(ours.state[mine[0]]) == ["step", "exp_avg", "exp_avg_sq"]


def test_groups_scales_missing_gradients_and_checkpoints() -> None:
    mine, its = parameters(), parameters()
    ours, plain = (
        make([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.0}])
        for make, params in ((native.LAMB, mine), (Plain, its))
    )
    for step in range(6):
        give_gradients(mine, step, 4.0)
        give_gradients(its, step)
        mine[step % 5].grad = its[step % 5].grad = None
        nn.utils.clip_grad_norm_(its, 0.5)
        ours.step(grad_scale=4.0, clip=0.5)
        plain.step()
        if step == 2:
            other = native.LAMB([{"params": mine[:2]}, {"params": mine[2:]}])
            other.load_state_dict(copy.deepcopy(ours.state_dict()))
            ours = copy.deepcopy(other)
            mine = [p for group in ours.param_groups for p in group["params"]]
    assert_close(mine, its, 0, 1e-6)


def test_low_precision_with_masters() -> None:
    mine, its = parameters(torch.bfloat16), parameters(torch.bfloat16)
    its = [nn.Parameter(p.detach().float()) for p in its]
    ours, plain = native.LAMB(mine, master=torch.float32), Plain(its)
    for step in range(4):
        give_wide_gradients(mine, its, step)
        ours.step()
        plain.step()
    assert_close([ours.state[p]["master"] for p in mine], its, 0, 1e-6)
    assert all(torch.equal(p, ours.state[p]["master"].bfloat16()) for p in mine)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": "small"}, {"overlap": "forward"}, {"delayed": True}],
    ids=str,
)
def test_wrong_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"LAMB.*{next(iter(options))}="):
        native.LAMB(parameters(), **options)


# Several ranks.


def of(model: nn.Module) -> Optimizer:
    """Parameters of one bucket in two groups, interleaved."""
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return native.LAMB([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)


def plain(model: nn.Module) -> Optimizer:
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    return Plain([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=0.02)


def _accumulates(training: Run) -> None:
    training.steps(2)
    training.backward()
    training.steps(2)


def _as_plain() -> list[int]:
    """At stage 0 each rank updates whole tensors; all stages have the same gradients."""
    whole = Run(plain, stage=0)
    _accumulates(whole)
    counts, real, ends = list[int](), module.over_our_ranks, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "over_our_ranks", lambda *given: counts.append(given[0].numel()) or real(*given))
        for stage in (1, 3):
            training = Run(of, stage=stage)
            _accumulates(training)
            ends.append(training.result())
    for losses, values, _ in ends:
        assert losses == pytest.approx(whole.losses, rel=1e-5)
        for name, value in whole.result()[1].items():
            torch.testing.assert_close(values[name], value, rtol=0, atol=2e-6)
    _same(*ends)
    return counts


def test_ranks_sum_all_norms_in_one_reduction() -> None:
    for counts in run(2, _as_plain):
        assert len(counts) == 2 * 4 and set(counts) == {2 * 11}


def test_on_the_host_and_on_nvme_it_is_the_same_to_the_bit(tmp_path: Path) -> None:
    options = {"stage": 3, "dtype": torch.bfloat16}
    for found in run(2, _each_equal, [of], str(tmp_path), options, "parameters"):
        assert all(states > 0 and size > 0 for states, size in found.values())


@pytest.mark.slow
def test_checkpoints_load_at_either_tier(tmp_path: Path) -> None:
    run(2, _resumed, of, str(tmp_path), "dcp")
