"""The differences between two plan files, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from dataclasses import dataclass, fields, replace
from math import isclose

from zerograph.cli.view.collapsing import collapse_rows, collapsed_name, skeleton
from zerograph.core.files.planfile import PlanFile
from zerograph.core.machine import TIERS, Machine
from zerograph.core.plan import Bucket, Plan, decided
from zerograph.core.step import Param
from zerograph.core.timeline import STREAMS
from zerograph.core.units import format_bytes, format_seconds

Value = str | int | float | None
_NOISE = 1e-9
_NAMED = 2
"""Parameters of a bucket that are named."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same in both.

    Attributes:
        part: "decisions", "peaks", "seconds" or "other".
        name: what differs.
        a, b: the two; None where one has nothing. Bytes and seconds are numbers.
        count: how many alike it stands for, from ``name`` to ``last``.
    """

    part: str
    name: str
    a: Value
    b: Value
    count: int = 1
    last: str = ""

    @property
    def title(self) -> str:
        """The name of the difference, for people."""
        return collapsed_name(self.name, self.last, self.count)

    def text(self, value: Value) -> str:
        """One of the two, for people."""
        if value is None:
            return "-"
        if self.part == "peaks":
            return format_bytes(float(value))
        return format_seconds(float(value)) if self.part == "seconds" else str(value)


def differences(a: PlanFile, b: PlanFile) -> list[Difference]:
    """Everything that differs: decisions, peaks and seconds one by one, the rest by name."""
    changes = [d for d in (*_decisions(a, b), *_peaks(a, b), *_seconds(a, b)) if not _same(d)]
    return [*_collapsed(changes), *_rest(a, b)]


def _same(d: Difference) -> bool:
    if d.part == "seconds" and d.a is not None and d.b is not None:
        return isclose(float(d.a), float(d.b), rel_tol=_NOISE)
    return d.a == d.b


def _collapsed(changes: Iterable[Difference]) -> Iterator[Difference]:
    """Buckets of consecutive layers that differ in the same way are one difference."""
    for rows in collapse_rows(changes, lambda d: d.name, _alike):
        yield replace(rows[0], count=len(rows), last=rows[-1].name)


def _alike(x: Difference, y: Difference) -> bool:
    return (x.part, skeleton(str(x.a)), skeleton(str(x.b))) == (y.part, skeleton(str(y.a)), skeleton(str(y.b)))


def _decisions(a: PlanFile, b: PlanFile) -> Iterator[Difference]:
    yield Difference("decisions", "model", a.model, b.model)
    yield Difference("decisions", "machine", a.machine.name, b.machine.name)
    for name, text in decided(Plan).items():
        if name not in ("buckets", "recompute", "save", "offload"):  # listed one by one below
            yield Difference("decisions", text, getattr(a.plan, name), getattr(b.plan, name))
    yield Difference("decisions", "number of buckets", len(a.plan.buckets), len(b.plan.buckets))
    mine, theirs = ({bucket.name: bucket for bucket in file.plan.buckets} for file in (a, b))
    if mine.keys() == theirs.keys():  # in another order: the first that is not in its place
        moved = next((pair for pair in zip(mine, theirs, strict=True) if pair[0] != pair[1]), ("", ""))
        yield Difference("decisions", "order of buckets", *moved)
    names = list(dict.fromkeys((*mine, *theirs)))
    for name in names:
        yield Difference("decisions", f"bucket {name}", *_content(mine.get(name), theirs.get(name)))
    for name in names:
        if name in mine and name in theirs:
            for field, text in decided(Bucket).items():
                here, there = _value(getattr(mine[name], field)), _value(getattr(theirs[name], field))
                yield Difference("decisions", f"{text} {name}", here, there)
    ours, others = _activations(a.plan), _activations(b.plan)
    for layer in dict.fromkeys((*ours, *others)):
        yield Difference("decisions", f"activations {layer}", ours.get(layer, "saved"), others.get(layer, "saved"))


def _activations(plan: Plan) -> dict[str, str]:
    """The handling of layers' activations, and of single ones, where they are not just saved."""
    offload = dict(plan.offload)
    found = {
        layer: ("recomputed, inputs " if layer in plan.recompute else "") + f"on {offload[layer]}"
        if layer in offload
        else "recomputed"
        for layer in (*plan.recompute, *offload)
    }
    return found | {name: "saved of a recomputed layer" for name in plan.save if name not in offload}


def _value(value: object) -> str:
    return "as for all" if value is None else str(value)


def _content(old: Bucket | None, new: Bucket | None) -> tuple[Value, Value]:
    """The parameters in one bucket and not in the other, or the whole bucket where the other plan has none."""
    kept = set(old.params if old else ()) & set(new.params if new else ())
    return _params(old, kept), _params(new, kept)


def _params(bucket: Bucket | None, kept: Set[Param]) -> Value:
    if bucket is None:
        return None
    own = [f"{p.name} {list(p.shape)} {p.compute_dtype}" for p in bucket.params if p not in kept]
    return ", ".join(own[:_NAMED]) + (f", {len(own) - _NAMED} more" if len(own) > _NAMED else "")


def _peaks(a: PlanFile, b: PlanFile) -> Iterator[Difference]:
    for tier in TIERS:
        mine, theirs = a.forecast.peaks.get(tier), b.forecast.peaks.get(tier)
        yield Difference("peaks", tier, mine.bytes if mine else None, theirs.bytes if theirs else None)
        yield Difference("peaks", f"budget of {tier}", a.budget.get(tier), b.budget.get(tier))


def _seconds(a: PlanFile, b: PlanFile) -> Iterator[Difference]:
    yield Difference("seconds", "step", a.seconds, b.seconds)
    yield Difference("seconds", "earlier micro-batches", a.earlier, b.earlier)
    exposed = a.forecast.exposed_communication, b.forecast.exposed_communication
    yield Difference("seconds", "exposed communication", *exposed)
    mine, theirs = a.forecast.busy(), b.forecast.busy()
    for stream in STREAMS:
        yield Difference("seconds", stream, mine.get(stream), theirs.get(stream))


def _rest(a: PlanFile, b: PlanFile) -> Iterator[Difference]:
    """Parts that follow from the decisions, or say more about them: how long each is, and that they differ."""
    parts: Mapping[str, Callable[[PlanFile], Sized]] = {
        "tasks": lambda file: file.forecast.spans,
        "holdings": lambda file: file.holdings,
        "reasons": lambda file: file.reasons,
        "passes": lambda file: file.passes,
        "not counted": lambda file: file.forecast.not_counted,
    }
    for name, part in parts.items():
        if part(a) != part(b):
            yield Difference("other", name, len(part(a)), len(part(b)))
    numbers = {"tokens": (a.tokens, b.tokens), "flops": (a.flops, b.flops), **_figures(a.machine, b.machine)}
    yield from (Difference("other", name, *pair) for name, pair in numbers.items() if pair[0] != pair[1])


def _figures(a: Machine, b: Machine) -> dict[str, tuple[Value, Value]]:
    """The measured figures of machines of one name."""
    names = [field.name for field in fields(Machine) if field.compare] if a.name == b.name else []
    return {f"machine's {name}": (str(getattr(a, name)), str(getattr(b, name))) for name in names}
