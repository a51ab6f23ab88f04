"""The tasks of one step under one plan, in program order: what computes, what moves, and the memory that both hold.

Shards that live off the device are fetched into their slice of the gathered bucket (an in-place all-gather) when its
gather could begin. Reduced gradients are spilled one bucket after another. Saved activations leave after the last
layer that reads them, and begin to come back as many layers before the backward needs them as the plan says. Tiles of
an oversized operator follow one another, at most one more of them whole than is gathered ahead. Where optimizer states
live off the device, updates run on the host (:mod:`~zerograph.planner.updates`). What goes to NVMe or comes from it
passes through buffers on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerograph.core.machine import Tier
from zerograph.core.step import layer_of_activation
from zerograph.planner.simulate import Memory, Task, on
from zerograph.planner.transfers import Transfer
from zerograph.planner.updates import BUFFERS, HostUpdates

if TYPE_CHECKING:
    from zerograph.planner.regions import Life
    from zerograph.planner.schedule import Decisions, PhaseWork, Piece, Scheduler


class Run:
    """The tasks of one step.

    Attributes:
        tasks: in program order.
    """

    def __init__(self, scheduler: Scheduler, decisions: Decisions) -> None:
        self.scheduler, self.decisions, self.rates = scheduler, decisions, scheduler.rates
        self.tasks: list[Task] = []
        self.freed: dict[int, Memory] = {}  # task -> memory of buckets that are free at its end
        self.whole: dict[int, int] = {}  # bucket -> the task that gathered it, or its first tile
        self.last = -1  # the task that ran last in the compute stream
        self.waits: set[int] = set()
        self.reducing = -1  # the reduction that started last
        self.under_way: list[tuple[int, Transfer]] = []  # reductions that the computation has not waited for
        self.reduced: dict[int, None] = {}  # buckets, in the order in which their gradients were reduced
        self.parts = scheduler.all_transfers(decisions.tiles)
        self.ahead = decisions.ahead or (decisions.prefetch,) * len(decisions.homes)
        self.tier_of = dict(decisions.offload)  # layer or activation -> tier of what is saved of it
        self.saved: dict[str, int] = {}  # layer or activation -> the task that moved the last of what is saved away
        self.arriving: dict[int, list[int]] = {}  # region -> tasks that bring back what it needs
        # That and region -> the tasks that free what is saved on the device, and that bring it back.
        self.left: dict[tuple[str, int], int] = {}
        self.came: dict[tuple[str, int], int] = {}
        self.spilled: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that moved its gradient home
        self.writes: list[int] = []  # tasks that release staging buffers of what goes to NVMe
        self._phases()

    def _phases(self) -> None:
        for phase in self.scheduler.phases(self.decisions):
            self._phase(phase)
        if self.scheduler.profile.training:
            self._update()
        for index, memory in self.freed.items():
            task = self.tasks[index]
            self.tasks[index] = task._replace(gives=task.gives + memory)

    def _phase(self, phase: PhaseWork) -> None:
        for visit in phase.gathers.get(0, ()):
            self._gather(phase.visits[visit].bucket)
        backward = phase.name == "backward"
        if backward and self.tier_of:
            self._fetch_saved(phase, 0)
        ready: tuple[int, ...] = ()
        place = 0
        for piece in phase.pieces:
            if piece.first and self.tier_of:
                self.waits.update(self.arriving.pop(piece.region, ()))
                place += 1
                if backward:
                    self._fetch_saved(phase, place)
            for visit in piece.visits:
                self._free(phase, visit)
                for other in phase.gathers.get(visit, ()) if visit else ():
                    self._gather(phase.visits[other].bucket)
                self.waits.add(self.whole[phase.visits[visit].bucket])
            self._reduce_all(ready)
            ready = piece.ready
            self._compute(piece)
            if piece.last and not backward and self.tier_of:
                self._offload_saved(phase, piece.region)
        self._reduce_all(ready)
        self._free(phase, len(phase.visits))
        while self.under_way:
            self._wait_reduce()

    def add(self, task: Task) -> int:
        """Append ``task``; returns its index."""
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _compute(self, piece: Piece) -> None:
        task = piece.task
        if piece.slices > 1:
            self._tiled(piece)
            return
        after = tuple(sorted(self.waits))
        self.waits.clear()
        self.last = self.add(task._replace(after=after) if after else task)
        self.computed(piece, self.last)

    # What memory is for, told to those who keep books (zerograph.planner.books); the search does not ask.

    def computed(self, piece: Piece, task: int) -> None:
        """``piece``, or a slice of it, runs in ``task``."""

    def took(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        """``task`` takes ``size`` bytes of ``tier`` for ``what`` of ``label``."""

    def gave(self, what: str, label: str, tier: Tier, size: int, task: int) -> None:
        """As many of them are free at the end of ``task``."""

    def _tiled(self, piece: Piece) -> None:
        """Slices of a piece: the tiles that each works on come before it, and are free and reduced after it."""
        task, slices = piece.task, piece.slices
        launch = self.rates.machine.launch
        seconds = max(0.0, task.seconds - launch) / slices + launch
        gathered = {bucket: [self.whole.pop(bucket)] if bucket in self.whole else [] for bucket in piece.reads}
        for i in range(slices):
            takes = task.takes if i == 0 else ()
            gives = task.gives if i == slices - 1 else ()
            ends: list[tuple[int, int]] = []
            wholes: list[Transfer] = []
            gradients: list[Transfer] = []
            for bucket in (*piece.reads, *(b for b in piece.makes if b not in piece.reads)):
                tiles = self.decisions.tiles[bucket]
                tile, parts = i * tiles // slices, self.parts[bucket]
                begins = i == 0 or tile != (i - 1) * tiles // slices
                ended = i == slices - 1 or tile != (i + 1) * tiles // slices
                if bucket in gathered:
                    there = gathered[bucket]
                    for ahead in range(len(there), min(tiles, tile + self.ahead[bucket] + 1) if begins else 0):
                        there.append(self._bring(bucket, parts[ahead]))
                    self.waits.add(there[tile])
                    if ended:
                        gives += on("device", parts[tile].whole)
                        wholes.append(parts[tile])
                if bucket in piece.makes:
                    if begins:
                        takes += on("device", parts[tile].gradients)
                        gradients.append(parts[tile])
                    ends += [(bucket, tile)] if ended else []
            after = tuple(sorted(self.waits))
            self.waits.clear()
            self.last = self.add(Task(task.name, "compute", seconds, after, takes, gives, task.module, task.source))
            self.computed(piece, self.last)
            for part in wholes:
                self.gave("whole", part.label, "device", part.whole, self.last)
            for part in gradients:
                self.took("full gradient", part.label, "device", part.gradients, self.last)
            for bucket, tile in ends:
                self._reduce(bucket, tile)

    def _gather(self, bucket: int) -> None:
        if bucket not in self.whole:
            self.whole[bucket] = self._bring(bucket, self.parts[bucket][0])

    def _bring(self, bucket: int, part: Transfer) -> int:
        """Gather a bucket or a tile of it, after fetching its shards; returns the gather."""
        homes = self.decisions.homes[bucket]
        after = (self.last,) if self.last >= 0 else ()
        size, takes = part.whole, on("device", part.whole)
        if homes.optimizer != "device" and self.decisions.residency[bucket] == "step":
            size -= part.shards.copy  # the copy on the device is a slice of the whole
            takes = on("device", size)
        took = -1
        if homes.parameters != "device" and part.shards.fetched:
            took = self._up(part, "shard", part.shards.fetched, homes.parameters, after, takes)
            after, takes = (took,), ()
        gather = self.add(Task(f"gather {part.label}", "gather", part.gather_seconds, after, takes, (), part.name))
        self.took("whole", part.label, "device", size, took if took >= 0 else gather)
        self._stall(gather)
        return gather

    def _stall(self, transfer: int) -> None:
        """Where nothing runs beside a collective, the next compute comes after it."""
        if not self.rates.overlaps:
            self.waits.add(transfer)

    def _free(self, phase: PhaseWork, visit: int) -> None:
        for i in phase.frees.get(visit, ()):
            bucket = phase.visits[i].bucket
            kept = self.decisions.residency[bucket]
            if self.decisions.tiles[bucket] > 1:
                continue  # tiles are freed one by one
            if kept == "use" or (kept == "backward" and phase.name == "backward"):
                self._let_go(bucket)

    def _let_go(self, bucket: int) -> None:
        del self.whole[bucket]
        part = self.parts[bucket][0]
        self.freed[self.last] = self.freed.get(self.last, ()) + on("device", part.whole)
        self.gave("whole", part.label, "device", part.whole, self.last)

    def _reduce_all(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            self._reduce(bucket, 0)

    def _reduce(self, bucket: int, tile: int) -> None:
        """Start a reduction, for which the compute waits when a later one starts; then the gradient goes home."""
        part = self.parts[bucket][tile]
        home = self.decisions.homes[bucket].gradients
        self.reduced[bucket] = None
        if len(self.under_way) == self.decisions.reductions:
            self._wait_reduce()
        takes = on("device", part.reduced)
        self.reducing = self.add(
            Task(f"reduce {part.label}", "reduce", part.reduce_seconds, (self.last,), takes, (), part.name)
        )
        self.under_way.append((self.reducing, part))
        self.took("gradient", part.label, "device", part.reduced, self.reducing)
        self._stall(self.reducing)
        size = part.shards.gradient
        if home != "device" and size:
            self.spilled[bucket, tile] = self._down(part, "gradient", size, home, (self.reducing,), on("device", size))

    def _wait_reduce(self) -> None:
        """The next compute waits for the oldest reduction, and full gradients are free at its end.

        Where nothing runs beside a collective, the wait is what reads them: they are there until then.
        """
        reduction, part = self.under_way.pop(0)
        self.waits.add(reduction)
        read = reduction if self.rates.overlaps else max(reduction, self.last)
        self.freed[read] = self.freed.get(read, ()) + on("device", part.gradients)
        self.gave("full gradient", part.label, "device", part.gradients, read)

    def _offload_saved(self, phase: PhaseWork, region: int) -> None:
        """Move away what no later layer of the forward reads, of layers whose activations are offloaded."""
        for what, size in self._moving(phase, region).items():
            before, free = len(self.tasks), on("device", size)
            self.saved[what] = self._down(what, "activations", size, self.tier_of[what], (self.last,), free)
            self.left[what, region] = before

    def _fetch_saved(self, phase: PhaseWork, place: int) -> None:
        """Begin to bring back what regions from ``place`` on need, so many as the plan fetches ahead."""
        for region in phase.regions[place : place + self.decisions.fetch_ahead]:
            for what, size in self._moving(phase, region).items() if region not in self.arriving else ():
                after = tuple(sorted({self.last, self.saved[what]}))
                task = self._up(what, "activations", size, self.tier_of[what], after, on("device", size), moves=True)
                self.arriving.setdefault(region, []).append(task)
                self.came[what, region] = task

    def _moving(self, phase: PhaseWork, region: int) -> dict[str, int]:
        """Bytes of saved activations that leave or come with ``region``, by what the plan calls them."""
        sizes: dict[str, int] = {}
        for layer, lives in phase.moving.get(region, {}).items():
            for life in lives:
                what = self.away(layer, life)
                if what is not None:
                    sizes[what] = sizes.get(what, 0) + life.bytes
        return sizes

    def away(self, layer: str, life: Life) -> str | None:
        """What the plan offloads a saved activation of ``layer`` as: itself, or its layer; None where it stays."""
        return next((what for what in (life.activation, layer) if what in self.tier_of), None)

    def _down(
        self, part: Transfer | str, what: str, size: int, tier: Tier, after: tuple[int, ...], gives: Memory
    ) -> int:
        """Copy ``size`` bytes from the device to ``tier``; returns the last task, at whose end ``gives`` is free."""
        name, label = _named(part)
        to_nvme = tier == "nvme"
        staging = self.rates.staging
        if staging == "host":
            if to_nvme and len(self.writes) >= BUFFERS:
                after = tuple(sorted({*after, self.writes[-BUFFERS]}))
            seconds = self.rates.transfer("d2h", size)
            copy = self.add(Task(f"spill {what} of {label}", "d2h", seconds, after, on("host", size), gives, name))
            self.gave(what, label, "device", size, copy)
            self.took(what, label, "host", size, copy)
            if not to_nvme:
                return copy
            after, gives = (copy,), on("host", size)
        seconds = self.rates.transfer("nvme_write", size)
        written = self.add(Task(f"write {what} of {label}", "nvme_write", seconds, after, on(tier, size), gives, name))
        self.writes.append(written)
        self.gave(what, label, staging, size, written)
        self.took(what, label, tier, size, written)
        return written

    def _up(
        self, part: Transfer | str, what: str, size: int, tier: Tier, after: tuple[int, ...], takes: Memory, *,
        moves: bool = False,
    ) -> int:  # fmt: skip
        """Copy ``size`` bytes from ``tier`` into ``takes`` on the device; with ``moves`` they are free on the tier."""
        name, label = _named(part)
        gives = on(tier, size) if moves else ()
        if tier == "nvme":
            direct = self.rates.staging == "device"
            seconds = self.rates.transfer("nvme_read", size)
            into = takes if direct else on("host", size)
            read = self.add(Task(f"read {what} of {label}", "nvme_read", seconds, after, into, gives, name))
            if moves:
                self.gave(what, label, tier, size, read)
            if direct:
                return read
            self.took(what, label, "host", size, read)
            after, gives, moves = (read,), on("host", size), True
        seconds = self.rates.transfer("h2d", size)
        fetched = self.add(Task(f"fetch {what} of {label}", "h2d", seconds, after, takes, gives, name))
        if moves:
            self.gave(what, label, "host", size, fetched)
        return fetched

    def _update(self) -> None:
        """The optimizer, when all gradients are there: first what lives on the device, then the rest."""
        after = (self.reducing,) if self.reducing >= 0 else ()
        scheduler, homes = self.scheduler, self.decisions.homes
        host = [bucket for bucket in self._by_readiness() if homes[bucket].optimizer != "device"]
        seconds = scheduler.update_seconds(host)
        if seconds or not host:
            self.add(Task("optimizer update", "compute", seconds, after, module="optimizer"))
        updates = HostUpdates(self.rates, self, tuple(sorted({*after, self.last} - {-1})))
        for bucket in host:
            for tile, part in enumerate(self.parts[bucket]):
                if part.shards.optimizer:
                    updates.update(part, homes[bucket], self.spilled.get((bucket, tile)))

    def _by_readiness(self) -> list[int]:
        """All buckets, those whose gradients were reduced first before the others."""
        return list(dict.fromkeys((*self.reduced, *range(len(self.decisions.homes)))))


def _named(part: Transfer | str) -> tuple[str, str]:
    """The module that ``part`` belongs to, and what to call it: a layer and an activation are their own."""
    if isinstance(part, str):
        return layer_of_activation(part) or part, part
    return part.name, part.label
