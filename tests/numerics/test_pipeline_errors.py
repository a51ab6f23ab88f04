"""Errors in the stages of a pipeline, and what the other ranks hear of them.

Tests ``integrations/pipelining.py``.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from numerics.test_caught_errors import TRAP, trapped
from numerics.test_pipeline import WORLD, Case, Part, Training
from ranks import run
from torch import Tensor

from zerograph.core.errors import RankError


class TrappedPart(Part):
    def after(self, x: Tensor, name: str) -> Tensor:
        return trapped(x, int(name))


def _caught_by_class(place: str) -> list[float]:
    """One stage on all ranks: nobody waits for another stage."""
    ours = Training(Case(once=True, part=TrappedPart), stages=1)
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


def _spared() -> list[float]:
    spared = Training(Case(once=True, part=TrappedPart), stages=1)
    return spared.run([0, 2])[0]


@pytest.mark.parametrize("place", ["forward 1", "backward 2"])
def test_errors_of_stages_are_caught_by_class_and_training_goes_on(place: str) -> None:
    assert run(WORLD, _caught_by_class, place) == run(WORLD, _spared)
