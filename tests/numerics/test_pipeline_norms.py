"""Native optimizers of a pipeline's stages: one norm clips all of them, and what is not finite in one skips all.

Tests ``optim/host.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Values, assert_same, full_values, sgd
from numerics.test_pipeline import WORLD, Case, Part, Training, batch, close, in_forward, loss_of, native
from ranks import refused, run
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

import zerograph
from zerograph.core.errors import UnsupportedError

CLIP = 0.3
"""Below the norm of the whole model's gradients, and above that of some stages'."""


class Clipped:
    """An optimizer whose steps all clip."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> None:
        self.optimizer, self.clip, self.norms = optimizer, clip, list[float]()

    def step(self) -> None:
        self.norms.append(float(self.clip()))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


@functools.cache
def truth(steps: int = 3) -> tuple[list[float], Values, list[float]]:
    """Of plain PyTorch in one process, on the whole batch: losses, values and norms."""
    model = Part(0, 1)
    optimizer, losses, norms = sgd(model), list[float](), list[float]()
    for seed in range(steps):
        loss = loss_of(model(batch(seed)), batch(seed))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, full_values(model), norms


def with_stages(case: Case) -> Training:
    training = Training(case)
    training.optimizer.stages = training.mesh["pp"].get_group()
    return training


def _clips(cases: list[Case]) -> None:
    for case in cases:
        training = with_stages(case)
        optimizer = training.optimizer

        def step(optimizer: Any = optimizer) -> float:
            optimizer.step(clip=CLIP)
            return optimizer.grad_norm

        training.optimizer = Clipped(optimizer, step)
        losses, values = training.run()
        close((losses, values), truth()[:2])
        assert min(truth()[2]) > CLIP
        assert training.optimizer.norms == pytest.approx(truth()[2], rel=1e-4)


def test_one_norm_clips_all_stages(tmp_path: Path) -> None:
    nvme = {"offload": "parameters", "path": str(tmp_path)}
    cases = [
        Case(optimizer=native, once=True),
        Case(ScheduleInterleaved1F1B, 2, True, in_forward, options=nvme),
        Case(optimizer=native, options=nvme),
    ]
    run(WORLD, _clips, cases)


def _overflows(last: bool) -> tuple[int, float, list[float], list[float]]:
    """A gradient of the last stage, or of the first, is infinite on one rank; then all goes on."""
    training, spared = with_stages(Case(optimizer=native, once=True)), with_stages(Case(optimizer=native, once=True))
    training.step(0)
    before = full_values(training.model)
    training.backward(1)
    if training.last == last and training.mesh.get_local_rank("dp") == 1:
        next(p for p in training.model.parameters() if p.to_local().numel()).grad.to_local().fill_(torch.inf)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert_same(full_values(training.model), before)
    norm = training.optimizer.grad_norm
    training.step(2)
    return training.optimizer.skipped, norm, training.losses, spared.run([0, 2])[0]


@pytest.mark.parametrize("last", [False, True])
def test_what_overflows_in_one_stage_skips_the_step_of_all(last: bool) -> None:
    for skipped, norm, losses, spared in run(WORLD, _overflows, last):
        assert skipped == 1 and norm == float("inf")
        assert [*losses[:1], *losses[2:]] == spared


def _scaled() -> tuple[int, float]:
    """A GradScaler knows one stage. A stage that it tells to skip takes part in the norm of the others."""
    training = with_stages(Case(optimizer=native, once=True))
    training.backward(0)
    optimizer = training.optimizer
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(training.first))
    optimizer.step(clip=CLIP)
    return optimizer.skipped, optimizer.grad_norm


def test_a_stage_that_a_scaler_tells_to_skip_lets_no_other_wait() -> None:
    found = run(WORLD, _scaled, timeout=60)
    assert [skipped for skipped, _ in found] == [1, 1, 0, 0]
    assert len({norm for _, norm in found}) == 1


def _warms_up(still: list[str]) -> list[list[float]]:
    """Norms of two steps, the first of which has learning rates of 0, on one stage or both."""
    found = []
    for stages in still:
        training, norms = with_stages(Case(optimizer=native, once=True)), list[float]()
        (group,) = training.optimizer.param_groups
        for rate in (0.0, 0.1):
            group["lr"] = rate if stages == "both" or training.first else 0.1
            training.backward(0)
            training.optimizer.step(clip=CLIP)
            training.optimizer.zero_grad()
            norms.append(training.optimizer.grad_norm)
        found.append(norms)
    return found


def test_the_first_step_of_a_warm_up_knows_all_stages() -> None:
    for both, first in run(WORLD, _warms_up, ["both", "first"], timeout=120):
        assert both == pytest.approx([truth()[2][0]] * 2, rel=1e-4)  # nothing moved before the second one
        assert first[0] == pytest.approx(truth()[2][0], rel=1e-4)


def _states_of_one_stage() -> tuple[list[float], list[float]]:
    """DCP takes a step with learning rates of 0 where there are no states yet, here on the ranks of one stage alone."""
    training, other = with_stages(Case(optimizer=native, once=True)), with_stages(Case(optimizer=native, once=True))
    if training.first:
        get_optimizer_state_dict(training.model, training.optimizer)
    return training.run()[0], other.run()[0]


def test_states_that_one_stage_asks_for_let_no_other_wait() -> None:
    for ours, without in run(WORLD, _states_of_one_stage, timeout=60):
        assert ours == without
    assert len(without) == 3  # of the last stage


def _holds_none_of_its_stage() -> float:
    """An optimizer of one stage holds other parameters, as of a stage that is frozen."""
    training = Training(Case(optimizer=native, once=True))
    optimizer: Any = native(nn.Linear(2, 2)) if training.first else training.optimizer
    optimizer.stages = training.mesh["pp"].get_group()
    training.backward(0)
    optimizer.step(clip=CLIP)
    return optimizer.grad_norm


def test_all_stages_add_up_alike_whatever_their_optimizers_hold() -> None:
    assert len(set(run(WORLD, _holds_none_of_its_stage, timeout=30))) == 1


def _wrong() -> tuple[str, str]:
    training = Training(Case(optimizer=native, once=True))
    training.backward(0)
    training.optimizer.stages = training.mesh["dp"].get_group()
    step = refused(training.optimizer.step)
    params = list(training.model.parameters())
    return step, refused(functools.partial(zerograph.clip_grad_norm_, params, 1.0, stages=dist.group.WORLD))


def test_a_group_that_has_ranks_of_one_stage_is_refused() -> None:
    for messages in run(WORLD, _wrong):
        assert all("stages has 2 ranks that share one stage" in text and 'mesh["pp"]' in text for text in messages)


def _one_bit() -> None:
    params = [nn.Parameter(torch.ones(4))]
    params[0].grad = torch.ones(4)
    optimizer = zerograph.optim.OneBitAdam(params, freeze_step=3)
    optimizer.stages = dist.group.WORLD
    with pytest.raises(UnsupportedError, match="OneBitAdam with stages"):
        optimizer.step()


def test_one_bit_adam_is_refused() -> None:
    run(2, _one_bit)
