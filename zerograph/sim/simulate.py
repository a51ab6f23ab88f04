"""Programs over time: when each instruction runs, and what every tier holds meanwhile. No torch in here.

Every rule of a step is written here, once, for the planner's coarse programs and for those that run:

- A stream runs its instructions in program order, one at a time.
- An instruction that computes waits for what it reads, and for the waits that stand before it.
- An instruction beside those starts when its stream is free, what it reads is ready, and what computes before it in the
  program has ended. Where nothing overlaps, as inside of a CPU host, the next compute comes after any collective.
- Between CPU hosts a collective occupies one network, in turn, beside compute. Its part inside of hosts takes cores: it
  lengthens the next compute, behind the start of a reduction and the wait for a gather.
- An unsharded bucket is not gathered again, and stays so until it is freed and not resident.
- Memory is taken when the instruction starts that writes a register of it first, and given back at the end of the last
  that names one dead; what a segment holds meanwhile is written in :mod:`zerograph.core.segment_profile`. A transfer
  allocates its result when it starts. A collective gives back what it reads at its end; where nothing overlaps, at the
  end of what computes before the wait.
- Where buckets use buffers again, as between CPU ranks, a gathered one takes its buffer when it is waited for.
  :mod:`zerograph.sim.buffers` says which; a free one is memory until it goes.
- A staging buffer is one place of a ring: whoever works in it waits for all that worked in what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from zerograph.core.files.planfile import Holding
from zerograph.core.files.runfile import Measured
from zerograph.core.instructions import Free
from zerograph.core.machine import TIERS
from zerograph.core.program import Program
from zerograph.core.timeline import Forecast
from zerograph.sim.buffers import GatherBuffers
from zerograph.sim.cells import Cells
from zerograph.sim.costs import ARRIVE, COMPUTE, FREE, GATHER, MARK, REDUCE, VIEW, WAIT, Costs, Fact, TierBytes
from zerograph.sim.forecast import forecast
from zerograph.sim.rates import Rates
from zerograph.sim.tasks import LATE, Tasks

Peaks = tuple[int, ...]
"""The most bytes that each of :data:`~zerograph.core.machine.TIERS` holds, in that order."""


def simulate(
    programs: Sequence[Program],
    rates: Rates,
    *,
    measured: Measured | None = None,
    held: tuple[Holding, ...] = (),
    not_counted: tuple[str, ...] = (),
    parts: Mapping[int, Callable[[Holding], Iterable[Holding]]] = MappingProxyType({}),
) -> tuple[Forecast, tuple[Holding, ...]]:
    """Run ``programs`` one after another.

    Args:
        measured: seconds that replace those of ``rates``.
        held: memory that is there from the start to the end.
        parts: by register of a coarse program, what it stands for.

    Returns:
        The forecast, and the uses of memory, first those ``held``.
    """
    cells = Cells(parts)
    run = walk(programs, Costs(rates, measured), cells)
    holdings = (*held, *cells.holdings)
    return forecast(tuple(run.described()), run, holdings, not_counted), holdings


def time_and_peaks(programs: Sequence[Program], costs: Costs, held: TierBytes = ()) -> tuple[float, Peaks, int]:
    """Seconds and peak bytes of every tier that :func:`simulate` finds for coarse programs, and how many tasks it has.

    The registers of coarse programs have memory of their own each, so that an instruction takes and gives the same in
    every program that it stands in, and ``costs`` knows that of those that were met before.
    """
    run = walk(programs, costs)
    peaks = []
    for tier in TIERS:
        level = most = sum(size for at, size in held if at == tier)
        for _, _, _, size in sorted(run.events[tier]):
            level += size
            if level > most:
                most = level
        peaks.append(most)
    return max(run.ends, default=0.0), tuple(peaks), len(run.ends)


def walk(programs: Sequence[Program], costs: Costs, cells: Cells | None = None) -> Tasks:
    """Run ``programs``.

    Args:
        cells: given what is alive, where registers may share memory; else each has its own, and nobody asks what waited
            for what.
    """
    walk = _Walk(costs, cells)
    for program in programs:
        walk.enter(program)
        walk.run(program)
    walk.finish()
    return walk.tasks


class _Walk:
    """Programs as they run; what happens to a task is written where that is known, and then stays.

    Attributes:
        tasks: those that ran.
    """

    def __init__(self, costs: Costs, cells: Cells | None) -> None:
        self.tasks, self._costs, self._cells, self._overlaps = Tasks(), costs, cells, costs.overlaps
        self._ends, self._events = self.tasks.ends, self.tasks.events
        self._buffers: GatherBuffers | None = None
        if costs.uses_buffers_again:
            tell = self.tasks.hold if cells is None else cells.hold_buffer
            self._buffers = GatherBuffers(self.tasks.streams, tell, beside=costs.network)
        self._coming = self._buffers.coming if self._buffers is not None else {}
        self._unsharded: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that gathered it
        self._ready: dict[int, int] = {}  # register -> the task that writes it
        self._collectives: dict[int, Fact] = {}  # task -> what is given back when it is waited for
        # Place -> register, who worked there before, and who does.
        self._slots: dict[int, tuple[int, list[int], list[int]]] = {}
        self._waits: list[int] = []  # what the next compute waits for
        self._last = self._computed = -1  # the task that computed last, and the one before
        self._network = -1  # the last task on it
        self._carried = 0.0  # seconds of collectives that the next compute spends

    def enter(self, program: Program) -> None:
        """``program`` begins: it finds what is given to it."""
        begin = len(self.tasks.starts)
        self.tasks.programs.append(begin)
        if not program.carries:
            self._ready = {}
        if self._buffers is not None and program.trims:
            self._buffers.trim(self._last)
        if self._cells is not None:
            self._cells.enter(program, self.tasks)
            return
        for register in program.given:
            content = program.contents[register]
            self.tasks.events[content.tier].append((0.0, -1, begin, content.bytes))

    def run(self, program: Program) -> None:
        """The instructions of ``program``, one after another."""
        # A search spends its time here. A call for each instruction would be an eighth of that.
        tasks, known, cells, last = self.tasks, self._costs.known, self._cells, self._last
        starts, ends, events, free = tasks.starts, tasks.ends, tasks.events, tasks.free
        streams, facts, ready, unsharded, waits = tasks.streams, tasks.facts, self._ready, self._unsharded, self._waits
        for each in program.instructions:
            fact = known.get(id(each)) or self._costs.learn(each, program)
            role = fact.role
            if role == WAIT or role == ARRIVE:  # noqa: SIM109  twice as fast
                self._wait(fact)
                continue
            if role == FREE:
                self._free(fact)
                continue
            if role == MARK:
                continue
            if role == VIEW:
                self._view(fact)
                continue
            instruction, _, stream, seconds, reads, writes, takes, gives, replaced, part, slot, _, _, apart = fact
            task = len(starts)
            if role == COMPUTE:
                # Only what computes waits here: transfers that stand behind a wait go on by themselves.
                after = waits.copy()
                waits.clear()
                self._computed, self._last, last = last, task, task
                if self._carried:
                    seconds, self._carried = seconds + self._carried, 0.0
            else:
                if role == GATHER:
                    if part in unsharded:
                        # It stayed resident: whoever waits for it waits for the gather of before, and nothing is taken.
                        ready[writes[0]] = unsharded[part]
                        continue
                    unsharded[part] = task
                    if self._buffers is not None and takes:
                        self._coming[task], takes = takes[0][1], ()
                after = [last] if last >= 0 else []
                if apart is not None and apart.travels:
                    if self._network >= 0:
                        after.append(self._network)
                    self._network = task
            for register in reads:
                if register in ready:
                    after.append(ready[register])
            if slot is not None:
                after += self._before_in(program.contents[slot].storage, slot, task)
            facts.append(fact)
            start = free.get(stream, 0.0)
            for earlier in after:
                if ends[earlier] > start:
                    start = ends[earlier]
            end = free[stream] = start + seconds
            starts.append(start)
            streams.append(stream)
            ends.append(end)
            if replaced and cells is None:
                self._give_early(task, after, replaced)
            for register in writes:
                ready[register] = task
            if role == GATHER or role == REDUCE:  # noqa: SIM109  twice as fast
                self._collectives[task] = fact
                if apart is None:
                    if not self._overlaps:
                        waits.append(task)
                elif role == REDUCE:
                    self._carried += apart.cores
                # What it reads stays until somebody waits for it, and is given back there.
                gives = ()
            if cells is not None:
                tasks.instructions.append((instruction, program))  # type: ignore[arg-type]  # the others were dealt with
                tasks.after.append(tuple(sorted(set(after))))
                cells.ran(instruction, program, task, buffered=task in self._coming)
                continue
            # What takes no time takes and gives at one moment: in that order, so that its memory counts in the peak.
            order = LATE if end != start else 2 * task
            for tier, size in takes:
                events[tier].append((start, order, task, size))
            for tier, size in gives:
                events[tier].append((end, 2 * task + 1, task, -size))

    def finish(self) -> None:
        """Hold to the end what nobody gave back."""
        if self._buffers is not None:
            self._buffers.finish()
        if self._cells is not None:
            self._cells.finish()

    def _wait(self, fact: Fact) -> None:
        """What computes next waits for the task that fills a register; one that arrives by its gather does not."""
        ready, last, ends = self._ready, self._last, self._ends
        task = ready[fact.reads[0]]
        if fact.role == WAIT:
            self._waits.append(task)
        for register in fact.writes:
            ready[register] = task
        if task in self._coming:
            self._buffers.take(fact.part, task, last)  # type: ignore[union-attr]  # else nothing is coming
        begun = self._collectives.pop(task, None)
        # Where nothing overlaps, the wait is what reads them: they are there until then.
        read = task if self._overlaps or last < task else last
        if begun is not None and begun.apart is not None:
            if ends[read] < ends[task]:
                read = task
            if begun.role == GATHER:
                self._carried += begun.apart.cores
        if self._cells is not None:
            self._cells.waited(fact.instruction, task, begun, read)
            return
        for tier, size in fact.takes:
            self.tasks.take(tier, size, task)
        if begun is not None:
            for tier, size in begun.gives:
                self._events[tier].append((ends[read], 2 * read + 1, read, -size))

    def _free(self, fact: Fact) -> None:
        """A bucket or tile is let go of, unless it stays."""
        if fact.resident or self._unsharded.pop(fact.part, None) is None:
            return
        if self._cells is not None:
            kept = isinstance(fact.instruction, Free) and fact.instruction.kept
            # Where nothing has computed yet, the first task stands in.
            self._cells.freed(fact.part, max(self._last, 0), kept=kept)
        if self._buffers is not None and self._buffers.give(fact.part, self._last):
            # It would wait for the next forward, and whatever is free with it.
            if fact.ends:
                self._buffers.trim(self._last)
        elif self._cells is None:
            for tier, size in fact.gives:
                self._events[tier].append((self._ends[self._last], 2 * self._last + 1, self._last, -size))

    def _view(self, fact: Fact) -> None:
        """Another register refers to what is there, or comes."""
        if fact.reads[0] in self._ready:
            self._ready[fact.writes[0]] = self._ready[fact.reads[0]]
        if self._cells is not None:
            self._cells.viewed(fact.instruction, max(self._last, 0))

    def _before_in(self, place: int, register: int, task: int) -> list[int]:
        """``task`` works in a place of a ring; those that worked there for another register, which must have ended."""
        held, before, now = self._slots.get(place, (-1, [], []))
        if held != register:
            before, now = now, []
            self._slots[place] = register, before, now
        now.append(task)
        return before

    def _give_early(self, task: int, after: Sequence[int], size: int) -> None:
        """Of what dies in ``task`` so much is free when the last ends that it waited for, as what it leaves behind is
        taken at once."""
        ended = self.tasks.last_of(after, self._computed)
        if ended >= 0:
            self.tasks.give("device", size, ended)
        else:
            self.tasks.events["device"].append((self.tasks.starts[task], -1, task, -size))
