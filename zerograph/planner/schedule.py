"""A candidate plan as tasks for the simulation, before anything is partitioned or lowered.

It follows what the passes, the lowering and the executor will do, at the grain of one compute task per layer and
visit of a bucket. ``zerograph.outlook`` does the same from the programs that will really run; tests hold one against
the other. Coarser here: what is saved follows :mod:`~zerograph.planner.liveness`, memory of a layer that a plan cuts
in several is taken with its first part, and several short layers are not merged into one segment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from zerograph.ir import Param, Phase
from zerograph.plan import Plan, Residency
from zerograph.planner.liveness import Mode
from zerograph.planner.rates import Rates, gathered_bytes, reduced_bytes, shard_bytes
from zerograph.planner.regions import Atom, Life, Profile, Region
from zerograph.planner.simulate import Memory, Task
from zerograph.planner.visits import Visit, visits


@dataclass(frozen=True, slots=True)
class _Piece:
    """One compute task of every schedule with the same buckets, prefetch and recomputation.

    ``visits`` start before it. ``ready`` are the buckets whose last gradient it makes.
    """

    task: Task
    visits: tuple[int, ...]
    ready: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Phase:
    name: Phase
    pieces: tuple[_Piece, ...]
    visits: tuple[Visit, ...]
    gathers: Mapping[int, Sequence[int]]  # visit -> those whose gather begins at its start
    frees: Mapping[int, Sequence[int]]  # visit, or their number for the end -> those freed at its start


@dataclass(frozen=True, slots=True)
class _Transfer:
    """What moving one bucket costs.

    A gather takes ``whole`` when it starts; a reduction then takes ``shards`` of the gradients and frees all of them.
    """

    name: str
    gather: str
    gather_seconds: float
    whole: Memory
    reduce: str
    reduce_seconds: float
    shards: Memory
    gradients: Memory


class Scheduler:
    """Schedules plans of one step on one machine, whose buckets hold the same parameters.

    What plans share is worked out once: the search changes residencies hundreds of times.
    """

    def __init__(
        self, profile: Profile, buckets: Sequence[Sequence[Param]], names: Sequence[str], rates: Rates
    ) -> None:
        self.profile, self.rates = profile, rates
        self.bucket_of = {p.name: i for i, params in enumerate(buckets) for p in params}
        self.update = rates.update(profile.params, moments=2)
        work = [next(iter(region.work.values())) for region in profile.regions]  # gradients are the same in all modes
        whole = {name: size for w in work for atom in w.atoms for name, size in atom.gradients}
        self.transfers = [_transfer(name, params, whole, rates) for name, params in zip(names, buckets, strict=True)]
        self._parts: dict[tuple[int, Mode], list[_Part]] = {}
        self._phases: dict[tuple[int, tuple[str, ...], bool], tuple[_Phase, ...]] = {}

    def tasks(self, plan: Plan) -> list[Task]:
        """One step under ``plan``: forward, backward and the optimizer's update."""
        return self.schedule([b.residency for b in plan.buckets], plan.prefetch, plan.recompute, plan.save_others)

    def schedule(
        self, residency: Sequence[Residency], prefetch: int, recompute: tuple[str, ...], save_others: bool
    ) -> list[Task]:
        """The same for the decisions of a plan; ``residency`` is that of each bucket."""
        key = (prefetch, recompute, save_others)
        if key not in self._phases:
            self._phases[key] = tuple(_phases(self, *key))
        run = _Run(self, residency)
        for phase in self._phases[key]:
            run.phase(phase)
        if self.profile.training:
            run.update()
        return run.finished()

    def alive(self, task: str, recompute: tuple[str, ...], save_others: bool) -> list[Life]:
        """What is held through the compute tasks named ``task``, besides buckets, gradients and temporaries."""
        modes = _modes(self.profile, recompute, save_others)
        regions = [k for k, region in enumerate(self.profile.regions) if _name(region) == task]
        found = []
        for life in self.profile.lives:
            end = _end(life, modes)
            if any(life.start <= k and (end is None or k <= end) for k in regions):
                found.append(life)
        return found

    def parts(self, region: int, mode: Mode) -> list[_Part]:
        """The work of a region, divided where buckets are first read."""
        key = (region, mode)
        if key not in self._parts:
            self._parts[key] = _parts(self.profile.regions[region].work[mode].atoms, self.bucket_of)
        return self._parts[key]


def _transfer(name: str, params: Sequence[Param], whole: dict[str, int], rates: Rates) -> _Transfer:
    world, trainable = rates.world_size, [p for p in params if p.trainable]
    gathered = gathered_bytes(params, world)
    return _Transfer(
        name=name,
        gather=f"gather {name}",
        gather_seconds=rates.collective(gathered),
        whole=_device(gathered),
        reduce=f"reduce {name}",
        reduce_seconds=rates.collective(reduced_bytes(trainable)),
        shards=_device(sum(shard_bytes(p, world) for p in trainable)),
        gradients=_device(sum(whole.get(p.name, 0) for p in trainable)),
    )


def _phases(scheduler: Scheduler, prefetch: int, recompute: tuple[str, ...], save_others: bool) -> Iterator[_Phase]:
    """Divide the regions of each phase into pieces and visits."""
    profile, modes = scheduler.profile, _modes(scheduler.profile, recompute, save_others)
    takes, gives = _memory(profile, modes)
    phases: tuple[Phase, ...] = ("forward", "backward") if profile.training else ("forward",)
    for name in phases:
        regions = [k for k, region in enumerate(profile.regions) if region.phase == name]
        yield _phase(scheduler, name, regions, modes, prefetch, takes, gives)


def _modes(profile: Profile, recompute: Sequence[str], save_others: bool) -> list[Mode]:
    """How each region treats its activations."""
    recomputed = frozenset(recompute)
    base: Mode = "none" if save_others else "auto"
    return ["full" if region.layer in recomputed else base for region in profile.regions]


def _name(region: Region) -> str:
    return f"{region.phase} {region.layer or 'outside of layers'}"


def _memory(profile: Profile, modes: Sequence[Mode]) -> tuple[list[int], list[int]]:
    """Bytes that begin to live with each region, and those that end with it."""
    count = len(profile.regions)
    takes, gives = [0] * count, [0] * count
    for life in profile.lives:
        takes[life.start] += life.bytes
        end = _end(life, modes)
        if end is not None:
            gives[end] += life.bytes
    return takes, gives


def _end(life: Life, modes: Sequence[Mode]) -> int | None:
    """The region that a life ends with; None where the user gets it."""
    if life.read is None:
        return None
    full = life.saved.get("full")
    enters = full is not None and modes[full] == "full"  # a layer that is recomputed, from this
    return max(life.read, life.saved.get(modes[life.start], 0), full if enters and full is not None else 0)


def _phase(
    scheduler: Scheduler,
    name: Phase,
    regions: Sequence[int],
    modes: Sequence[Mode],
    prefetch: int,
    takes: Sequence[int],
    gives: Sequence[int],
) -> _Phase:
    parts: list[tuple[int, _Part]] = []
    begins: list[int] = []
    for k in regions:
        found = scheduler.parts(k, modes[k])
        begins += [len(parts)] * len(found)
        parts += [(k, part) for part in found]
    found_visits = visits([part.buckets for _, part in parts], begins, prefetch)
    cuts = sorted({*begins, *(v.start for v in found_visits)})
    starts: dict[int, list[int]] = {}
    for number, visit in enumerate(found_visits):
        starts.setdefault(visit.start, []).append(number)
    ready: dict[int, list[int]] = {}
    for bucket, at in {bucket: i for i, (_, part) in enumerate(parts) for bucket in part.gradients}.items():
        ready.setdefault(at, []).append(bucket)
    pieces = []
    for begin, end in pairwise((*cuts, len(parts))):
        k, inside = parts[begin][0], [part for _, part in parts[begin:end]]
        region = scheduler.profile.regions[k]
        temporary = region.work[modes[k]].temporary
        first, last = begins[begin] == begin, end == len(parts) or parts[end][0] != k
        taken = temporary + (takes[k] if first else 0) + sum(sum(part.gradients.values()) for part in inside)
        given = temporary + (gives[k] if last else 0)
        seconds = scheduler.rates.compute(sum(p.flops for p in inside), sum(p.moved for p in inside))
        task = Task(_name(region), "compute", seconds, (), _device(taken), _device(given), region.module, region.source)
        done = tuple(bucket for at in range(begin, end) for bucket in ready.get(at, ()))
        pieces.append(_Piece(task, tuple(starts.get(begin, ())), done))
    return _Phase(name, tuple(pieces), found_visits, *_moments(found_visits))


def _device(size: int) -> Memory:
    return (("device", size),) if size else ()


@dataclass(frozen=True, slots=True)
class _Part:
    """Consecutive atoms that read the same buckets; ``gradients`` are bytes by bucket."""

    buckets: tuple[int, ...]
    flops: int
    moved: int
    gradients: dict[int, int]


def _parts(atoms: Sequence[Atom], bucket_of: dict[str, int]) -> list[_Part]:
    parts: list[_Part] = []
    for atom in atoms:
        buckets = tuple(dict.fromkeys(bucket_of[name] for name in atom.params))
        gradients: dict[int, int] = {}
        for name, size in atom.gradients:
            gradients[bucket_of[name]] = gradients.get(bucket_of[name], 0) + size
        if parts and set(buckets) <= set(parts[-1].buckets):
            old = parts.pop()
            for bucket, size in old.gradients.items():
                gradients[bucket] = gradients.get(bucket, 0) + size
            parts.append(_Part(old.buckets, old.flops + atom.flops, old.moved + atom.moved, gradients))
        else:
            parts.append(_Part(buckets, atom.flops, atom.moved, gradients))
    return parts


def _moments(found: Sequence[Visit]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Which gathers begin, and which buckets are freed, at the start of each visit."""
    gathers: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    for i, visit in enumerate(found):
        gathers.setdefault(visit.gathered, []).append(i)
        frees.setdefault(visit.freed, []).append(i)
    return gathers, frees


class _Run:
    """The tasks of one step, one after another."""

    def __init__(self, scheduler: Scheduler, residency: Sequence[Residency]) -> None:
        self.scheduler, self.residency = scheduler, residency
        self.tasks: list[Task] = []
        self.freed: dict[int, Memory] = {}  # task -> memory of buckets that are free at its end
        self.whole: dict[int, int] = {}  # bucket -> the task that gathered it
        self.last = -1  # the task that ran last in the compute stream, or began the phase
        self.waits: set[int] = set()
        self.reducing = -1

    def phase(self, phase: _Phase) -> None:
        """Forward or backward."""
        self.last = len(self.tasks) - 1
        for visit in phase.gathers.get(0, ()):
            self._gather(phase.visits[visit].bucket)
        ready: tuple[int, ...] = ()
        for piece in phase.pieces:
            for visit in piece.visits:
                self._free(phase, visit)
                for other in phase.gathers.get(visit, ()) if visit else ():
                    self._gather(phase.visits[other].bucket)
                self.waits.add(self.whole[phase.visits[visit].bucket])
            self._reduce(ready)
            ready = piece.ready
            task = piece.task
            after = tuple(sorted(self.waits))
            self.waits.clear()
            self.last = self._add(
                Task(task.name, "compute", task.seconds, after, task.takes, task.gives, task.module, task.source)
            )
        self._reduce(ready)
        self._free(phase, len(phase.visits))
        if self.reducing >= 0:
            self.waits.add(self.reducing)

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1

    def _gather(self, bucket: int) -> None:
        if bucket not in self.whole:
            moved = self.scheduler.transfers[bucket]
            after = (self.last,) if self.last >= 0 else ()
            self.whole[bucket] = self._add(
                Task(moved.gather, "gather", moved.gather_seconds, after, moved.whole, (), moved.name)
            )
            self._stall(self.whole[bucket])

    def _stall(self, transfer: int) -> None:
        """Where nothing runs beside a transfer, the next compute comes after it."""
        if not self.scheduler.rates.overlaps:
            self.waits.add(transfer)

    def _free(self, phase: _Phase, visit: int) -> None:
        for i in phase.frees.get(visit, ()):
            bucket = phase.visits[i].bucket
            kept = self.residency[bucket]
            if kept == "use" or (kept == "backward" and phase.name == "backward"):
                del self.whole[bucket]
                self.freed[self.last] = self.freed.get(self.last, ()) + self.scheduler.transfers[bucket].whole

    def _reduce(self, buckets: Sequence[int]) -> None:
        """Start reductions, each of which the compute waits for when the next one starts."""
        for bucket in buckets:
            moved = self.scheduler.transfers[bucket]
            if self.reducing >= 0:
                self.waits.add(self.reducing)
            memory = moved.shards, moved.gradients
            self.reducing = self._add(
                Task(moved.reduce, "reduce", moved.reduce_seconds, (self.last,), *memory, moved.name)
            )
            self._stall(self.reducing)

    def update(self) -> None:
        """The optimizer, when all gradients are there."""
        after = (self.reducing,) if self.reducing >= 0 else ()
        self._add(Task("optimizer update", "compute", self.scheduler.update, after, module="optimizer"))

    def finished(self) -> list[Task]:
        """All tasks, with what they free."""
        for index, memory in self.freed.items():
            task = self.tasks[index]
            self.tasks[index] = task._replace(gives=task.gives + memory)
        return self.tasks
