"""The entry with which a rank begins a program, and the errors where ranks differ; for all transports."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field

from zerograph.core.errors import CollectiveMismatch


@dataclass(frozen=True, slots=True)
class Entry:
    """The message of a rank to the others when it enters a program.

    Attributes:
        program: its kind and the user's function it was compiled from.
        sequence: a hash of its collectives, at most 60 bits.
        steps: of optimizers over the backend's parameters that this rank has taken.
        hint: what to do where others enter something else, if more is known than usual.
    """

    program: str = field(compare=False)  # ranks may read the same weight in other lines
    sequence: int
    steps: int
    hint: str = field(default="", compare=False)

    @classmethod
    def from_json(cls, text: str) -> Entry:
        """The entry that :meth:`to_json` wrote."""
        return cls(*json.loads(text))

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(astuple(self))

    def __str__(self) -> str:
        return f"the {self.program}, after {self.steps} optimizer steps"


def sequence_of(names: Iterable[str]) -> int:
    """The sequence of collectives on what is called ``names``, outside of compiled programs."""
    return int(hashlib.sha256("|".join(names).encode()).hexdigest()[:15], 16)


def describe_difference(mine: Entry, rank: int, theirs: Entry, me: int) -> CollectiveMismatch:
    """The error for two ranks that enter with different entries."""
    if mine.steps != theirs.steps:
        return CollectiveMismatch(
            f"rank {me} has taken {mine.steps} optimizer steps and rank {rank} {theirs.steps}: "
            "their shards are parts of different parameters",
            "a step on some ranks only cannot be taken back: start all ranks again from a checkpoint, "
            "and let all ranks catch the same errors around backward and step together; with delayed=True let all save "
            "and evaluate together, as both settle the last update",
        )
    return CollectiveMismatch(
        f"rank {me} and rank {rank} are about to run different programs: rank {me} {mine}; rank {rank} {theirs}",
        mine.hint or theirs.hint or _hint(mine.program, theirs.program),
    )


def describe_deadlock(me: int, mine: str, rank: int, theirs: str) -> CollectiveMismatch:
    """The error for two ranks that wait for each other at different places, as in "rank 0 waits ..."."""
    return CollectiveMismatch(
        f"rank {me} and rank {rank} wait for each other at different places: rank {me} waits {mine}; "
        f"rank {rank} waits {theirs}",
        _hint(mine, theirs),
    )


def _hint(*programs: str) -> str:
    """The next thing to do where ranks run different programs, by what is known of these."""
    if len({"inference" in program for program in programs}) > 1:
        return (
            "one rank alone cannot evaluate, as gathers need all ranks: let all evaluate, or call the model inside "
            "`with zerograph.gathered(model):`, which all ranks enter"
        )
    return (
        "all ranks must take the same batches, branches and layers: let what is drawn at random or depends on the data "
        f"be the same on all of them; {ROUTES}"
    )


ROUTES = (
    "at stages 1 and 2 ranks may read different weights in modules that Dynamo does not compile, such as the experts "
    "that their tokens are for"
)
"""The hint where ranks read different weights."""


def reason_of(error: BaseException) -> str:
    """One line about ``error`` for the other ranks."""
    # Hints are for the rank that failed; the text goes through the store, so it is cut.
    return f"{type(error).__name__}: {str(error).partition(chr(10) + chr(10))[0]}"[:400]
