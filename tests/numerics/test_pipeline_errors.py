"""Errors in the stages of a pipeline: all ranks of all stages raise, and train on as if the batch had not been there.

Tests ``integrations/pipelining.py``.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from graphs import pipeline_with
from numerics.test_caught_errors import TRAP, trapped
from numerics.test_pipeline import MICROBATCHES, WORLD, Case, Part, Training, inside, native
from ranks import RankFailure, refused, run
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from zerograph.core.errors import CollectiveMismatch, ConfigError, RankError
from zerograph.integrations.pipelining import once_per_step

SOON = 15.0
"""Seconds in which all ranks raise, on a machine with more ranks than cores."""


class TrappedPart(Part):
    def after(self, x: Tensor, name: str) -> Tensor:
        return trapped(x, int(name))


CASE = Case(once=True, part=TrappedPart)


def _caught_by_class(place: str) -> list[float]:
    """One stage on all ranks: nobody waits for another stage."""
    ours = Training(CASE, stages=1)
    ours.step(0)
    own = dist.get_rank() == 1
    if own:
        TRAP.place, TRAP.error = place, ValueError("boom")
    with pytest.raises(ValueError if own else RankError) as caught:
        ours.step(1)
    assert any("failed to run" in note.lower() for note in caught.value.__notes__)  # torch's, which names the stage
    reasons, error = list[BaseException](), caught.value.__cause__ or caught.value.__context__
    while error is not None and len(reasons) < 9:
        reasons.append(error)
        error = error.__cause__ or error.__context__
    assert caught.value not in reasons  # as it would be if both were each the other's
    assert own or "rank 1 failed: ValueError: boom" in str(caught.value)
    ours.optimizer.zero_grad()
    ours.step(2)
    return ours.losses


def _spared(steps: list[int], stages: int = 2, case: Case = CASE) -> list[float]:
    return Training(case, stages).run(steps)[0]


@pytest.mark.parametrize("place", ["forward 1", "backward 2"])
def test_errors_of_stages_are_caught_by_class_and_training_goes_on(place: str) -> None:
    assert run(WORLD, _caught_by_class, place) == run(WORLD, _spared, [0, 2], 1)


def _failing(training: Training, seed: int, rank: int, place: str, error: BaseException, soon: float = SOON) -> None:
    """A step that raises on all ranks, soon: its own error on ``rank``, and on others one that tells of it."""
    own, begun = dist.get_rank() == rank, time.monotonic()
    if own:
        TRAP.place, TRAP.error = place, error
    with pytest.raises(type(error) if own else RankError) as caught:
        training.backward(seed)
    assert time.monotonic() - begun < soon
    assert TRAP.place == ""
    assert own or f"{type(error).__name__}: {error}" in str(caught.value)
    training.optimizer.zero_grad()


# Ranks 0 and 1 have the first two layers, 2 and 3 the last two.
FAULTS: list[tuple[int, str, BaseException]] = [
    (0, "forward 0", ValueError("boom 1")),
    (3, "forward 2", MemoryError("boom 2")),
    (2, "backward 3", ValueError("boom 3")),
    (1, "backward 0", ValueError("boom 4")),
    (3, "loss", ValueError("boom 5")),
    (2, "forward 3", KeyboardInterrupt("boom 6")),
]


def _trap_loss(training: Training) -> None:
    given = training.schedule._loss_fn

    def loss(*args: Any) -> Tensor:
        TRAP.pass_by("loss")
        return given(*args)

    training.schedule._loss_fn = loss


def _every_fault(schedule: type[Any], chunks: int, transport: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        ours = Training(replace(CASE, schedule=schedule, chunks=chunks))
        _trap_loss(ours)
        ours.step(0)
        for seed, (rank, place, error) in enumerate(FAULTS, start=1):
            if chunks > 1:  # ranks 0 and 1 have layers 0 and 2, ranks 2 and 3 layers 1 and 3
                place = place.replace("2", "3") if rank > 1 else place
            _failing(ours, 100 + seed, rank, place, error)
            ours.step(seed)
    return ours.losses


@pytest.mark.parametrize(
    ("schedule", "chunks", "transport"),
    [(Schedule1F1B, 1, "auto"), (ScheduleGPipe, 1, "group"), (ScheduleInterleaved1F1B, 2, "auto")],
)
def test_an_error_in_one_stage_is_one_of_all_ranks(schedule: type[Any], chunks: int, transport: str) -> None:
    found = run(WORLD, _every_fault, schedule, chunks, transport)
    case = replace(CASE, schedule=schedule, chunks=chunks)
    assert found == run(WORLD, _spared, list(range(len(FAULTS) + 1)), 2, case)
    assert len(found[-1]) == len(FAULTS) + 1


def _first_steps(rank: int, place: str, stages: int) -> list[float]:
    """Errors before stages know each other's shapes: in the forward that asks for them, and while a rank compiles."""
    ours = Training(CASE, stages)
    _failing(ours, 100, rank, place, ValueError("too early"), soon=60)  # models are traced first
    ours.run([0, 1])
    compiled = Training(replace(CASE, traced_once=False), stages)

    def broken(*_: Any) -> int:
        raise ValueError("no compiler here")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr("zerograph.compiler.rewrite.PIPELINE", pipeline_with("recompute", broken))
        with pytest.raises(Exception, match="no compiler here"):
            compiled.backward(100)
    assert ours.losses == compiled.run([0, 1])[0]
    return ours.losses


# Of four stages the later ones know all shapes when the second one asks for its gradients.
@pytest.mark.parametrize(("rank", "place", "stages"), [(1, "backward 1", 4), (2, "forward 2", 2)])
def test_errors_in_the_first_step(rank: int, place: str, stages: int) -> None:
    assert run(WORLD, _first_steps, rank, place, stages) == run(WORLD, _spared, [0, 1], stages)


def _optimizer_fails(ranks: tuple[int, ...], steps: int, stages: int) -> list[str]:
    """In a hook before the step, on some ranks of the first stage, which the others have behind them by then."""
    ours, found = Training(CASE, stages), list[str]()
    for seed in range(steps):
        ours.step(seed)
    ours.backward(1)

    def hook(*_: Any) -> None:
        raise ValueError("no step")

    if dist.get_rank() in ranks:
        ours.optimizer.register_step_pre_hook(hook)
        with pytest.raises(ValueError, match="no step"):
            ours.optimizer.step()
    else:
        ours.optimizer.step()
    for seed in (2, 3, 4):
        with pytest.raises((RankError, CollectiveMismatch)) as caught:
            ours.backward(seed)
        found.append(str(caught.value))
    return found


@pytest.mark.parametrize(("ranks", "steps", "stages"), [((0,), 1, 2), ((0, 1), 1, 2), ((0, 1), 0, 2), ((0,), 1, 4)])
def test_an_optimizer_that_fails_on_one_stage_leaves_stages_of_different_ages(
    ranks: tuple[int, ...], steps: int, stages: int
) -> None:
    for rank, (first, second, third) in enumerate(run(WORLD, _optimizer_fails, ranks, steps, stages)):
        assert "no rank takes this step" in first or "rank 0 failed" in first, (rank, first)
        # Ranks of one stage compare their steps too, and are heard first.
        whole = len(ranks) == WORLD // stages  # a stage
        differ = "stages are of different ages" if whole else "their shards are parts of different parameters"
        assert differ in second and differ in third, (rank, second, third)


def _fails_before_its_norm(rank: int, stages: int) -> list[float]:
    """A native step waits for the norm of all stages. No rank has stepped when one fails before."""
    ours = Training(NORMED, stages)
    ours.optimizer.stages = ours.mesh["pp"].get_group()
    ours.step(0)
    for seed in (100, 200):
        _no_step(ours, seed, rank)
        with pytest.raises(RankError, match="no rank takes this step"):  # as of any error behind a schedule
            ours.backward(seed + 1)
        ours.optimizer.zero_grad()
        ours.step(seed // 100)
    return ours.losses[::2]  # without those of steps that were not taken


def _no_step(training: Training, seed: int, rank: int) -> None:
    def hook(*_: Any) -> None:
        raise ValueError("no step")

    training.backward(seed)
    own, begun = dist.get_rank() == rank, time.monotonic()
    handle = training.optimizer.register_step_pre_hook(hook) if own else None
    with pytest.raises(ValueError if own else RankError, match="no step"):
        training.optimizer.step()
    assert time.monotonic() - begun < SOON
    if handle is not None:
        handle.remove()
    training.optimizer.zero_grad()


NORMED = replace(CASE, optimizer=native)


@pytest.mark.parametrize(("rank", "stages"), [(0, 2), (3, 2), (2, 4)])
def test_a_step_that_fails_before_its_norm_ends_the_waits_of_other_stages(rank: int, stages: int) -> None:
    assert run(WORLD, _fails_before_its_norm, rank, stages) == run(WORLD, _spared, [0, 1, 2], stages, NORMED)


def _too_few_rows() -> list[float]:
    """Stage 0 fails before stages agree on whether to tell shapes, which they do in the first step, after an error and
    behind an evaluation; and before all that in its own check of arguments."""
    ours = Training(CASE)
    stage, backend = ours.schedule._stage, ours.backend
    parts = PipelineStage(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group)
    evaluation = ScheduleGPipe(parts, MICROBATCHES)  # of stages of its own
    once_per_step(evaluation, backend)
    assert parts._zg_neighbours is stage._zg_neighbours  # one rendezvous
    own = dist.get_rank() == 0

    def fails(step: Any, match: str, error: type[BaseException]) -> None:
        begun = time.monotonic()
        with pytest.raises(error if own else RankError, match=match):
            step()
        assert time.monotonic() - begun < SOON

    def too_few(schedule: Any) -> Any:
        rows = (ours.rows(5)[: 1 if own else None],) if ours.first else ()
        return lambda: schedule(*rows, **({"target": ours.rows(5)} if ours.last else {}))

    def held() -> None:
        with backend.no_sync() if own else nullcontext():
            ours.backward(5)

    fails(too_few(ours.schedule.step), "arg_mbs", ValueError)
    ours.step(0)
    with torch.no_grad():
        fails(too_few(evaluation.eval), "arg_mbs", ValueError)
        evaluation.eval(*((ours.rows(5),) if ours.first else ()))
    fails(held, "no_sync", ConfigError)
    ours.optimizer.zero_grad()
    ours.step(1)
    return ours.losses


def test_an_error_before_stages_agree_on_shapes() -> None:
    assert run(WORLD, _too_few_rows, timeout=120) == run(WORLD, _spared, [0, 1])


def _evaluates() -> list[float]:
    """A second schedule has the same stages, and an error in it ends the waits of all as well."""
    ours = Training(CASE)
    evaluation = ScheduleGPipe(ours.schedule._stage, MICROBATCHES)
    once_per_step(evaluation, ours.backend)
    inputs = (ours.rows(5),) if ours.first else ()
    ours.step(0)
    for failing in (True, False):
        if failing and dist.get_rank() == 2:
            TRAP.place, TRAP.error = "forward 3", ValueError("unseen")
        expected = ValueError if dist.get_rank() == 2 else RankError
        with torch.no_grad(), pytest.raises(expected, match="unseen") if failing else nullcontext():
            evaluation.eval(*inputs)
    ours.step(1)
    return ours.losses


def test_an_error_in_an_evaluation() -> None:
    assert run(WORLD, _evaluates) == run(WORLD, _spared, [0, 1])


def _updated_early(path: str) -> str:
    """Rank 0 fails when the last backwards of all ranks have updated parameters inside of them."""
    nvme = {"offload": "parameters", "path": path}
    ours = Training(Case(once=True, optimizer=inside, scales=False, options=nvme))
    ours.step(0)
    if dist.get_rank() == 0:

        def fails(*_: Any) -> None:
            raise ValueError("too late")

        ours.schedule._stage.perform_reduce_grad = fails
    with pytest.raises(ValueError if dist.get_rank() == 0 else RankError, match="too late"):
        ours.backward(1)
    return refused(ours.optimizer.step)


def test_what_backwards_have_updated_is_not_trained_on(tmp_path: Path) -> None:
    for message in run(WORLD, _updated_early, str(tmp_path)):
        assert "a step of the pipeline failed after a backward in it had updated parameters" in message


def _killed(rank: int) -> None:
    ours = Training(CASE)
    ours.step(0)
    if dist.get_rank() == rank:
        os._exit(7)
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        ours.step(1)
    assert time.monotonic() - begun < SOON
    raise AssertionError(f"heard: {caught.value}")


def test_a_killed_rank_ends_the_waits_of_all() -> None:
    with pytest.raises(RankFailure) as caught:
        run(WORLD, _killed, 3)
    heard = {rank: text.rpartition("AssertionError: ")[2] for rank, text in caught.value.ranks.items() if rank != 3}
    assert heard.keys() == {0, 1, 2}
    assert all(text.startswith("heard: ") for text in heard.values()), heard
    assert any("lost rank" in text or "ended" in text for text in heard.values()), heard
