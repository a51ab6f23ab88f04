"""The measurements of a run, as a file: which plan ran, what happened, and seconds to forecast it with again.

``backend.record()`` makes it and ``zerograph show PLAN --measured RUN`` reads it. No torch in here.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerograph.core.errors import ConfigError
from zerograph.core.files.kinds import versioned
from zerograph.core.files.planfile import canonical, forecast_data, forecast_of
from zerograph.core.instructions import Compute, DeviceUpdate, Gather, HostUpdate, Move, Reduce, Timed, Update
from zerograph.core.program import Segment
from zerograph.core.timeline import Forecast, Span
from zerograph.core.units import is_number

VERSION = 3
SNAPSHOT_PROTOCOL = 4
"""The newest pickle protocol that the reader of PyTorch's memory visualizer knows."""


def move_key(operation: str, what: str, bucket: int, label: str) -> str:
    """The name under which a run has the seconds of a move or of an update off the device; ``label`` of activations."""
    return f"{operation} {what} {label if bucket < 0 else bucket}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds that a run took, to forecast with instead of rates.

    Attributes:
        segments: by digest.
        gathers, reduces: by bucket.
        moves: by :func:`move_key`, between tiers, and of updates on the host of what moves for them.
        update: of all other updates.
    """

    segments: Mapping[str, float] = field(default_factory=dict)
    gathers: Mapping[int, float] = field(default_factory=dict)
    reduces: Mapping[int, float] = field(default_factory=dict)
    update: float | None = None
    moves: Mapping[str, float] = field(default_factory=dict)

    def of(self, instruction: Timed, segments: Sequence[Segment]) -> float | None:
        """Seconds of an instruction in a program with these segments; None where it was not measured."""
        match instruction:
            case Compute():
                return self.segments.get(segments[instruction.segment].digest)
            case Gather():
                return self.gathers.get(instruction.bucket)
            case Reduce():
                return self.reduces.get(instruction.bucket)
            case Update():
                return self.update
            case Move() | HostUpdate() | DeviceUpdate():
                return self.moves.get(
                    move_key(instruction.operation, instruction.what, instruction.bucket, instruction.label)
                )
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded step.

    Attributes:
        plan: digest of the plan that ran (:attr:`zerograph.core.plan.Plan.digest`): its decisions, whatever the batch.
        device: "cpu" or "cuda".
        forecast: what happened, in the schema of a forecast; spans name the segment or the bucket that they ran.
        measured: mean seconds of what is there several times.
    """

    plan: str
    device: str
    forecast: Forecast
    measured: Measured

    def to_json(self) -> str:
        """The text that :meth:`from_json` reads."""
        data = {"version": VERSION, "plan": self.plan, "device": self.device, **asdict(self.measured)}
        return canonical({**data, **forecast_data(self.forecast)})

    @classmethod
    def from_json(cls, text: str) -> Run:
        """The run that :meth:`to_json` wrote.

        Raises:
            ConfigError: another version, or no run.
        """
        hint = "give what `run.save(path)` wrote after `with backend.record() as run` (docs/guide/recording.md)"
        data = versioned(text, "a measured run", VERSION, hint, "record it again")
        try:
            return cls(str(data["plan"]), str(data["device"]), forecast_of(data), _measured(data))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the measured run is incomplete: {error}", hint) from None


@dataclass(frozen=True, slots=True)
class Beside:
    """A run beside the forecast of the plan that it ran.

    Attributes:
        run: what happened.
        retimed: the forecast again, with the seconds of ``run``.
        spans: by task of the plan, the spans of ``run`` that are that task.
    """

    run: Run
    retimed: Forecast
    spans: Mapping[int, list[Span]]

    @property
    def measured(self) -> Forecast:
        """The measured run, in the schema of a forecast."""
        return self.run.forecast


def write_snapshot(snapshot: Mapping[str, Any], path: Path) -> None:
    """Write a snapshot of memory as pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` read it.

    Args:
        snapshot: in the schema of ``torch.cuda.memory._snapshot()``.

    Raises:
        OSError: ``path`` cannot be written.
    """
    path.write_bytes(pickle.dumps(snapshot, protocol=SNAPSHOT_PROTOCOL))


def _measured(data: Mapping[str, Any]) -> Measured:
    by_bucket = {part: {int(bucket): s for bucket, s in data[part].items()} for part in ("gathers", "reduces")}
    found = Measured(dict(data["segments"]), **by_bucket, update=data["update"], moves=dict(data["moves"]))
    updates = [] if found.update is None else [found.update]
    parts = (found.segments, found.gathers, found.reduces, found.moves)
    _require_seconds([*updates, *(seconds for part in parts for seconds in part.values())])
    return found


def _require_seconds(values: Iterable[object]) -> None:
    for value in values:
        if not (is_number(value, int | float) and value >= 0):  # type: ignore[operator]
            raise ValueError(f"{value!r} are no seconds")
