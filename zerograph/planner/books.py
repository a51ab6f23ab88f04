"""What the memory of a scheduled step is used for: the same tasks as in the search, with books kept."""

from __future__ import annotations

from collections.abc import Iterator

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.planfile import Holding
from zerograph.core.step import Kind, layer_of_activation
from zerograph.core.timeline import Forecast
from zerograph.planner.rates import shard_bytes
from zerograph.planner.regions import Life
from zerograph.planner.run import Run
from zerograph.planner.schedule import Decisions, Piece, Scheduler, end_of, levels_of, need_of
from zerograph.planner.simulate import simulate
from zerograph.planner.updates import COPY, GRADIENT, STATES

_ALWAYS = -1
"""The task that stands for the start of a step, and for its end."""
_KINDS: dict[str, Kind] = {
    "whole": "gathered",
    "full gradient": "gradient",
    "gradient": "gradient",
    "activations": "activation",
    "shard": "param",
    GRADIENT: "gradient",
    STATES: "state",
    COPY: "param",
}


def scheduled(
    scheduler: Scheduler, plan: Plan, not_counted: tuple[str, ...] = ()
) -> tuple[Forecast, tuple[Holding, ...]]:
    """The forecast of ``plan`` from its schedule, and what its memory is used for; they agree at every moment."""
    books = Books(scheduler, Decisions.of(plan, scheduler.profile))
    states = tuple(_states(scheduler, plan))
    held = tuple((holding.tier, holding.bytes) for holding in states)
    return simulate(books.tasks, held, not_counted), (*states, *books.holdings)


def _states(scheduler: Scheduler, plan: Plan) -> Iterator[Holding]:
    """What lies on each tier between steps, bucket by bucket."""
    for bucket in plan.buckets:
        shards, homes = scheduler.transfers(bucket.index, 1)[0].shards, bucket.homes
        whole = sum(shard_bytes(p, plan.world_size) for p in bucket.params)
        trained = sum(shard_bytes(p, plan.world_size) for p in bucket.params if p.trainable)
        found: list[tuple[str, Kind, Tier, int]]
        if homes.optimizer == "device":
            found = [("shards", "param", "device", whole), ("states", "state", "device", trained * scheduler.moments)]
        else:
            frozen = shards.frozen if homes.parameters != "device" else 0
            stays = whole - shards.gradient - frozen
            found = [
                ("shards", "param", "device", stays),
                ("states", "state", "device", (trained - shards.gradient) * scheduler.moments),
                ("shards in the compute dtype", "param", homes.parameters, shards.copy + frozen),
                ("master copy and states", "state", homes.optimizer, shards.optimizer),
            ]
        for what, kind, tier, size in found:
            if size:
                yield Holding(f"{what} of {bucket.name}", kind, tier, size, _ALWAYS, _ALWAYS, bucket.name)


class Books(Run):
    """A run that knows what its memory is for.

    Attributes:
        holdings: what was taken during the step, with the tasks that hold it first and last.
    """

    def __init__(self, scheduler: Scheduler, decisions: Decisions) -> None:
        self.holdings: list[Holding] = []
        self._open: dict[tuple[str, str, Tier], list[tuple[int, int]]] = {}  # -> bytes, and the task that took them
        self._ran: dict[int, tuple[int, int]] = {}  # region -> its first and last compute task
        self._slices: dict[int, list[int]] = {}  # piece -> the tasks of its slices so far
        super().__init__(scheduler, decisions)
        for (what, label, tier), left in self._open.items():
            for size, task in left:
                self._hold(what, label, tier, size, task, _ALWAYS)
        levels = levels_of(scheduler.profile, decisions.levels)
        for life in scheduler.profile.lives:
            self.holdings += self._alive(life, end_of(life, levels), need_of(life, levels))

    def computed(self, piece: Piece, task: int) -> None:
        first, _ = self._ran.get(piece.region, (task, task))
        self._ran[piece.region] = first, task
        for bucket, size in piece.made:
            if bucket not in piece.makes:
                self.took("full gradient", self.scheduler.names[bucket], "device", size, task)
        ran = self._slices.setdefault(id(piece), [])
        ran.append(task)
        if len(ran) == piece.slices and piece.temporary:
            name, module, source = f"work of {piece.task.name}", piece.task.module, piece.task.source
            held = Holding(name, "temporary", "device", piece.temporary, ran[0], task, module, source)
            self.holdings.append(held)

    def took(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        if size:
            self._open.setdefault((what, label, tier), []).append((size, task))

    def gave(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        if what == "activations" and tier == "device":
            return  # these have a life of their own
        left = self._open.get((what, label, tier), [])
        while size:
            held, since = left.pop(0)
            self._hold(what, label, tier, min(held, size), since, task)
            if held > size:
                left.insert(0, (held - size, since))
            size -= min(held, size)

    def _hold(self, what: str, label: str, tier: Tier, size: int, first: int, last: int) -> None:
        module = layer_of_activation(label) or label.partition(" tile ")[0]
        name = label if what == "whole" else f"{what} of {label}"
        self.holdings.append(Holding(name, _KINDS[what], tier, size, first, last, module))

    def _alive(self, life: Life, end: int | None, need: int | None) -> Iterator[Holding]:
        """A life on the device, in two parts where it is elsewhere between forward and backward."""
        region = self.scheduler.profile.regions[life.start]
        first, last = self._ran[life.start][0], _ALWAYS if end is None else self._ran[end][1]
        parts = [(first, last)]
        what = self.away(region.layer, life) if region.phase == "forward" else None
        if life.read is not None and need is not None and what is not None:
            parts = [(first, self.left[what, life.read]), (self.came[what, need], last)]
        for begin, until in parts:
            yield Holding(life.name, "activation", "device", life.bytes, begin, until, region.module, life.source)
