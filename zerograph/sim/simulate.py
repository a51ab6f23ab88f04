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
    run = Tasks()
    starts, ends, events = run.starts, run.ends, run.events
    free, streams, facts = run.free, run.streams, run.facts
    known, overlaps, buffers = costs.known, costs.overlaps, None
    if costs.uses_buffers_again:
        tell = run.hold if cells is None else cells.hold_buffer
        buffers = GatherBuffers(run.streams, tell, beside=costs.network)
    coming = buffers.coming if buffers is not None else {}
    unsharded: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that gathered it
    slots: dict[int, tuple[int, list[int], list[int]]] = {}  # place -> register, who worked there before, and who does
    ready: dict[int, int] = {}  # register -> the task that writes it
    collectives: dict[int, Fact] = {}  # task -> what is given back when it is waited for
    waits: list[int] = []  # what the next compute waits for
    last = computed = -1  # the task that computed last, and the one before
    network, carried = -1, 0.0  # the last task on the network; seconds of collectives that the next compute spends
    for program in programs:
        begin = len(starts)
        run.programs.append(begin)
        if not program.carries:
            ready = {}
        if buffers is not None and program.trims:
            buffers.trim(last)
        if cells is not None:
            cells.enter(program, run)
        else:
            for register in program.given:
                content = program.contents[register]
                events[content.tier].append((0.0, -1, begin, content.bytes))
        for each in program.instructions:
            fact = known.get(id(each)) or costs.learn(each, program)
            (
                instruction, role, stream, seconds, reads, writes, takes, gives, replaced, part, slot, resident, over,
                apart,
            ) = fact  # fmt: skip
            if role == WAIT or role == ARRIVE:  # noqa: SIM109  twice as fast
                task = ready[reads[0]]
                if role == WAIT:
                    waits.append(task)
                for register in writes:
                    ready[register] = task
                if task in coming:
                    buffers.take(part, task, last)  # type: ignore[union-attr]  # else nothing is coming
                begun = collectives.pop(task, None)
                # Where nothing overlaps, the wait is what reads them: they are there until then.
                read = task if overlaps or last < task else last
                if begun is not None and begun.apart is not None:
                    if ends[read] < ends[task]:
                        read = task
                    if begun.role == GATHER:
                        carried += begun.apart.cores
                if cells is not None:
                    cells.waited(instruction, task, begun, read)
                    continue
                for tier, size in takes:
                    run.take(tier, size, task)
                if begun is not None:
                    for tier, size in begun.gives:
                        events[tier].append((ends[read], 2 * read + 1, read, -size))
                continue
            if role == FREE:
                gathered = None if resident else unsharded.pop(part, None)
                if gathered is not None:
                    if cells is not None:
                        # Where nothing has computed yet, the first task stands in.
                        kept = isinstance(instruction, Free) and instruction.kept
                        cells.freed(part, max(last, 0), kept=kept)
                    if buffers is not None and buffers.give(part, last):
                        # It would wait for the next forward, and whatever is free with it.
                        if over:
                            buffers.trim(last)
                        continue
                    if cells is not None:
                        continue
                    for tier, size in gives:
                        events[tier].append((ends[last], 2 * last + 1, last, -size))
                continue
            if role == MARK:
                continue
            if role == VIEW:
                if reads[0] in ready:
                    ready[writes[0]] = ready[reads[0]]
                if cells is not None:
                    cells.viewed(instruction, max(last, 0))
                continue
            task = len(starts)
            if role == COMPUTE:
                # Only what computes waits here: transfers that stand behind a wait go on by themselves.
                after, waits = waits, []
                computed, last = last, task
                if carried:
                    seconds, carried = seconds + carried, 0.0
            else:
                if role == GATHER:
                    if part in unsharded:
                        # It stayed resident: whoever waits for it waits for the gather of before, and nothing is taken.
                        ready[writes[0]] = unsharded[part]
                        continue
                    unsharded[part] = task
                    if buffers is not None and takes:
                        coming[task], takes = takes[0][1], ()
                after = [last] if last >= 0 else []
                if apart is not None and apart.travels:
                    if network >= 0:
                        after.append(network)
                    network = task
            for register in reads:
                if register in ready:
                    after.append(ready[register])
            if slot is not None:
                place = program.contents[slot].storage
                held, before, now = slots.get(place, (-1, [], []))
                if held != slot:
                    # A new register in this place of the ring: all that worked for the one before must have ended.
                    before, now = now, []
                    slots[place] = slot, before, now
                after += before
                now.append(task)
            facts.append(fact)
            # Here and not in a function: its calls would be an eighth of the time of a search.
            start = free.get(stream, 0.0)
            for earlier in after:
                if ends[earlier] > start:
                    start = ends[earlier]
            end = free[stream] = start + seconds
            starts.append(start)
            streams.append(stream)
            ends.append(end)
            if replaced and cells is None:
                # Free when the last ends that it waited for, as what it leaves behind is taken at once.
                ended = run.last_of(after, computed)
                if ended >= 0:
                    events["device"].append((ends[ended], 2 * ended + 1, ended, -replaced))
                else:
                    events["device"].append((start, -1, task, -replaced))
            for register in writes:
                ready[register] = task
            if role == GATHER or role == REDUCE:  # noqa: SIM109  twice as fast
                collectives[task] = fact
                if apart is None:
                    if not overlaps:
                        waits.append(task)
                elif role == REDUCE:
                    carried += apart.cores
                # What it reads stays until somebody waits for it, and is given back there.
                gives = ()
            if cells is not None:
                run.instructions.append((instruction, program))  # type: ignore[arg-type]  # the others were dealt with
                run.after.append(tuple(sorted(set(after))))
                cells.ran(instruction, program, task, buffered=task in coming)
                continue
            # What takes no time takes and gives at one moment: in that order, so that its memory counts in the peak.
            order = LATE if end != start else 2 * task
            for tier, size in takes:
                events[tier].append((start, order, task, size))
            for tier, size in gives:
                events[tier].append((end, 2 * task + 1, task, -size))
    if buffers is not None:
        buffers.finish()
    if cells is not None:
        cells.finish()
    return run
