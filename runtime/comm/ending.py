"""Why ranks cannot go on together, as they tell each other through the store."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

from zerograph.core.errors import CollectiveMismatch, RankError, ZeroGraphError
from zerograph.runtime.comm.roster import Roster

ROLL_CALL = 5.0
"""Seconds that ranks have to answer when a connection was closed."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a generation ended.

    Attributes:
        rank: who ended it.
        kind: its own error; a connection of its that closed; the end of other processes, which it saw; or a difference
            between ranks, which it found.
        text: the error, or what says so.
        hint: for the error.
        gone: the ranks whose processes ended, or that do not answer.
    """

    rank: int
    kind: Literal["error", "connection", "process", "difference"]
    text: str = ""
    hint: str = ""
    gone: tuple[int, ...] = ()

    @classmethod
    def of_difference(cls, rank: int, difference: ZeroGraphError) -> Ending:
        """That ``rank`` found one."""
        return cls(rank, "difference", str(difference).partition("\n\n")[0], difference.hint)

    @classmethod
    def from_json(cls, text: str) -> Ending:
        """The ending that :meth:`to_json` wrote."""
        found = json.loads(text)
        return cls(**found | {"gone": tuple(found["gone"])})

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    def error(self, cannot: str, roster: Roster, reports: str) -> ZeroGraphError:
        """The error of a rank that ``cannot`` go on; ``reports`` are those of the ranks that are gone."""
        first, gone = roster.named([self.rank]), roster.named(self.gone)
        match self.kind:
            case "difference":
                return CollectiveMismatch(self.text, self.hint)
            case "error":
                return RankError(
                    f"{cannot}: {first} failed: {self.text}",
                    f"see the output of rank {self.rank}; where all ranks catch their errors, the next program runs "
                    "again",
                )
            case "process":
                return RankError(f"{cannot}: {gone} ended; {reports}", roster.where(self.gone))
        closed = f"a connection of {first} closed ({self.text})"
        if not self.gone:
            return RankError(
                f"{cannot}: {closed}, and all ranks still answer",
                "the link between two hosts is cut, or something closes idle connections",
            )
        return RankError(
            f"{cannot}: lost {gone}: {closed}, and {gone} did not answer for {ROLL_CALL:.0f} s; {reports}",
            roster.where(self.gone),
        )
