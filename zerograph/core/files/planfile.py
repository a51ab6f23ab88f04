"""A plan with everything that people ask about it: its forecast, what is held when, and why. No torch in here.

``zerograph plan`` writes it as canonical JSON; ``show``, ``diff``, ``check`` and ``passes`` read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import UnionType
from typing import Any

from zerograph.core.errors import ConfigError
from zerograph.core.executable import missing, tiers_run
from zerograph.core.files.columns import from_table, table
from zerograph.core.files.kinds import versioned
from zerograph.core.files.linediff import unified
from zerograph.core.files.programs_data import programs_data, programs_of
from zerograph.core.machine import Machine, Tier
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.step import Kind
from zerograph.core.timeline import Forecast, Peak, Span
from zerograph.core.units import is_number

VERSION = 13


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that something holds for a while.

    Attributes:
        name: what it is, for people: ``"blocks.3.attn.qkv.weight"``.
        kind: what role it plays in the step.
        tier: where it lies.
        bytes: of this rank.
        first, last: the tasks during which it is held, both included; -1 stands for before the step and after it.
        module, source: where it comes from; empty when unknown.
    """

    name: str
    kind: Kind
    tier: Tier
    bytes: int
    first: int
    last: int
    module: str = ""
    source: str = ""

    def held_at(self, time: float, spans: Sequence[Span]) -> bool:
        """Whether it occupies memory at ``time``; streams run side by side, so the order of tasks does not tell."""
        begun = self.first == -1 or spans[self.first].start <= time
        return begun and (self.last == -1 or time < spans[self.last].end)


@dataclass(frozen=True, slots=True)
class Reason:
    """One decision about ``subject`` (a bucket, a tensor, the whole plan), and why it was made."""

    subject: str
    decision: str
    why: str


@dataclass(frozen=True, slots=True)
class PassRecord:
    """The edits of one pass to one graph; ``diff`` is a unified diff of the graph's text, empty without edits."""

    graph: str
    name: str
    edits: int
    diff: str = ""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One training step, planned.

    Attributes:
        model: what the user named.
        plan: the decisions.
        machine: where it is to run.
        budget: bytes per tier that the plan had to fit, the reserve taken off.
        forecast: what will happen, task by task.
        holdings: what memory is used for.
        reasons: decisions, most important first.
        passes: what they did, in order.
        tokens: tokens per rank and micro-batch, or samples; 0 when unknown.
        unit: "tokens" or "samples".
        flops: operations of matrix products per rank and micro-batch.
        programs: of the step, which the forecast simulates: forward, backward and update.
        micro_batches: backwards before an update. The forecast is of the last of them, and of the update.
        earlier: seconds of those before it, together.
    """

    model: str
    plan: Plan
    machine: Machine
    budget: Mapping[Tier, int]
    forecast: Forecast
    holdings: tuple[Holding, ...] = ()
    reasons: tuple[Reason, ...] = ()
    passes: tuple[PassRecord, ...] = ()
    tokens: int = 0
    unit: str = "tokens"
    flops: int = 0
    programs: tuple[Program, ...] = ()
    micro_batches: int = 1
    earlier: float = 0.0
    version: int = field(default=VERSION, init=False)

    @property
    def seconds(self) -> float:
        """Seconds of the step, all micro-batches together."""
        return self.earlier + self.forecast.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens, or samples, per second of all ranks together."""
        seconds = self.seconds
        return self.tokens * self.micro_batches * self.plan.ranks / seconds if seconds else 0.0

    @property
    def peak_flops(self) -> float:
        """Floating-point operations per second that utilization is relative to
        (:meth:`~zerograph.core.machine.Machine.peak_rate` of the compute dtype)."""
        return self.machine.peak_rate(self.plan.compute_dtype)[0]

    @property
    def model_flops_utilization(self) -> float:
        """Share of :attr:`peak_flops` that the model's own products use (MFU); what is recomputed counts once."""
        rate, seconds = self.peak_flops, self.seconds
        return self.flops * self.micro_batches / rate / seconds if rate and seconds else 0.0

    @property
    def unexecuted(self) -> str:
        """The features that the plan needs and nothing executes yet, for people; empty when the plan can be run."""
        return missing(self.plan, tiers_run(self.machine))

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, one line, with a digest of everything else in it."""
        return canonical({**(data := self._data()), "digest": _digest(data)})

    @property
    def digest(self) -> str:
        """Short hash of the content."""
        return _digest(self._data())

    def _data(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "model": self.model,
            "plan": json.loads(self.plan.to_json()),
            "machine": json.loads(self.machine.to_json()),
            "budget": dict(self.budget),
            **forecast_data(self.forecast),
            "holdings": table(Holding, self.holdings),
            "reasons": table(Reason, self.reasons),
            "passes": table(PassRecord, self.passes),
            "tokens": self.tokens,
            "unit": self.unit,
            "flops": self.flops,
            "programs": programs_data(self.programs),
            "micro_batches": self.micro_batches,
            "earlier": self.earlier,
        }

    @classmethod
    def from_json(cls, text: str, *, verify: bool = True) -> PlanFile:
        """The file that :meth:`to_json` wrote; without ``verify`` also one that was changed by hand since.

        Raises:
            ConfigError: another version, no plan file, or one that was changed by hand.
        """
        data = versioned(
            text, "a plan", VERSION, "give what `zerograph plan -o plan.json` wrote", "make the plan again"
        )
        digest = data.pop("digest")
        # Numbers changed by hand would be shown as a forecast.
        if verify and digest != _digest(data):
            raise ConfigError(f"the plan was changed: its digest is not {digest}", "make the plan again")
        try:
            return cls._of(data)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"the plan is incomplete: {error}", "make the plan again") from None

    @classmethod
    def _of(cls, data: dict[str, Any]) -> PlanFile:
        _require_numbers(data)
        return cls(
            model=data["model"],
            plan=Plan.from_json(json.dumps(data["plan"])),
            machine=Machine.from_json(json.dumps(data["machine"])),
            budget=data["budget"],
            forecast=forecast_of(data),
            holdings=from_table(Holding, data["holdings"]),
            reasons=from_table(Reason, data["reasons"]),
            passes=from_table(PassRecord, data["passes"]),
            tokens=data["tokens"],
            unit=data["unit"],
            flops=data["flops"],
            programs=programs_of(data["programs"]),
            micro_batches=data["micro_batches"],
            earlier=data["earlier"],
        )


def _require_numbers(data: dict[str, Any]) -> None:
    """Refuse what a text editor puts where numbers belong, before sums and comparisons meet it."""
    _require("critical_path", data["critical_path"], int)
    _require("budget", list(data["budget"].values()), int)
    for tier, curve in data["memory"].items():
        _require(f"memory of {tier}", [number for point in curve for number in point], int | float)
    for tier, peak in data["peaks"].items():
        _require(f"peak of {tier}", [peak["bytes"], peak["task"]], int)
    _require("tokens and flops", [data["tokens"], data["flops"], data["earlier"]], int | float)
    _require("micro_batches", [data["micro_batches"]], int)


def _require(what: str, values: Iterable[Any], kind: type | UnionType) -> None:
    for value in values:
        if not is_number(value, kind):
            raise ValueError(f"{what} holds {value!r}")


_MOST_LINES = 400


def graph_diff(before: str, after: str) -> str:
    """A unified diff, shortened where a deep model repeats itself."""
    lines = list(unified(before.splitlines(), after.splitlines(), context=1))
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... {len(lines) - _MOST_LINES} more lines"]
    return "\n".join(lines)


def forecast_data(forecast: Forecast) -> dict[str, Any]:
    """The parts of a file that :func:`forecast_of` reads."""
    return {
        "spans": table(Span, forecast.spans),
        "memory": {tier: [list(point) for point in curve] for tier, curve in forecast.memory.items()},
        "peaks": {tier: asdict(peak) for tier, peak in forecast.peaks.items()},
        "critical_path": list(forecast.critical_path),
        "not_counted": list(forecast.not_counted),
    }


def forecast_of(data: dict[str, Any]) -> Forecast:
    """The forecast that :func:`forecast_data` was given.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError: there is none.
    """
    return Forecast(
        spans=from_table(Span, data["spans"]),
        memory={tier: tuple((t, b) for t, b in curve) for tier, curve in data["memory"].items()},
        peaks={tier: Peak(**peak) for tier, peak in data["peaks"].items()},
        critical_path=tuple(data.get("critical_path", ())),
        not_counted=tuple(data.get("not_counted", ())),
    )


def canonical(data: Any) -> str:
    """JSON in one line, sorted by keys."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:16]
