"""Programs over time: when each instruction runs, and what every tier holds meanwhile. No torch in here.

Every rule of a step is told here, once, for programs that the planner sketches and for those that run:

- A stream runs its instructions in program order, one at a time.
- An instruction that computes waits for what it reads, and for the waits that stand before it.
- An instruction beside those starts when its stream is free, what it reads is ready, and what computes before it in the
  program has ended. Where nothing overlaps, as on a CPU, the next compute comes after any collective.
- A bucket that is whole is not gathered again, and is whole until it is freed and not kept.
- Memory is taken when the instruction starts that writes a register of it first, and given back at the end of the last
  that names one dead; what a segment holds meanwhile is told in :mod:`zerograph.core.segment_profile`. A transfer
  allocates its result when it starts. A collective gives back what it reads at its end; where nothing overlaps, at the
  end of what computes before the wait.
- Where buckets use buffers again, as between CPU ranks, a gathered one takes its buffer when it is waited for.
  :mod:`zerograph.sim.buffers` says which; a free one is memory until it goes.
- A staging buffer is one place of a ring: whoever works in it waits for all that worked in what was there before.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from zerograph.core.files.planfile import Holding
from zerograph.core.files.runfile import Measured
from zerograph.core.instructions import (
    Collective,
    Compute,
    Computing,
    Free,
    Gather,
    Instruction,
    Move,
    Timed,
    View,
    Wait,
    WaitGather,
)
from zerograph.core.machine import TIERS, Tier
from zerograph.core.program import Program, Segment
from zerograph.core.step import Kind
from zerograph.core.timeline import Forecast, Peak, Span, Stream
from zerograph.sim.buffers import GatherBuffers

Memory = tuple[tuple[Tier, int], ...]
"""Bytes per tier."""
Peaks = tuple[int, ...]
"""The most bytes that each of :data:`~zerograph.core.machine.TIERS` holds, in that order."""


def on(tier: Tier, size: int) -> Memory:
    """``size`` bytes on ``tier``."""
    return ((tier, size),) if size else ()


class CostModel(Protocol):
    """The costs of instructions on a machine."""

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside compute."""

    @property
    def uses_buffers_again(self) -> bool:
        """Whether gathered buckets take turns in the same memory."""

    def seconds(self, instruction: Timed, segments: Sequence[Segment]) -> float:
        """The seconds of one instruction, of a program with these segments."""


def simulate(
    programs: Sequence[Program],
    rates: CostModel,
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
        parts: by register of a sketch, what it stands for.

    Returns:
        The forecast, and the uses of memory, first those ``held``.
    """
    cells = _Cells(parts)
    run = walk(programs, Costs(rates, measured), cells)
    holdings = (*held, *cells.holdings)
    return _forecast(tuple(run.described()), run, holdings, not_counted), holdings


def again(before: Forecast, seconds: Sequence[float], holdings: Iterable[Holding]) -> Forecast:
    """``before`` again, where its tasks take ``seconds``; what they wait for is as it was, and so are its ``holdings``.

    Raises:
        ValueError: a task waits for itself or a later one.
    """
    run, spans = Tasks(), []
    for span, length in zip(before.spans, seconds, strict=True):
        if any(earlier >= span.task for earlier in span.after):
            raise ValueError(f"task {span.task} ({span.name}) waits for a later one: {span.after}")
        run.begin(span.stream, length, span.after)
        spans.append(replace(span, start=run.starts[-1], end=run.ends[-1]))
    return _forecast(tuple(spans), run, holdings, before.not_counted)


def time_and_peaks(programs: Sequence[Program], costs: Costs, held: Memory = ()) -> tuple[float, Peaks, int]:
    """Seconds and peak bytes of every tier that :func:`simulate` finds for a sketch, and how many tasks it has.

    The registers of a sketch have memory of their own each, so that an instruction takes and gives the same in every
    program that it stands in, and ``costs`` knows that of those that were met before.
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


class Costs:
    """The costs of instructions in seconds and memory; those that were met before are known."""

    def __init__(self, rates: CostModel, measured: Measured | None = None) -> None:
        self.rates, self.measured = rates, measured
        self.overlaps, self.uses_buffers_again = rates.overlaps, rates.uses_buffers_again
        self.known: dict[int, _Fact] = {}  # by identity; the fact keeps its instruction alive

    def learn(self, instruction: Instruction, program: Program) -> _Fact:
        """All about ``instruction``, from now on known."""
        contents, reads, writes = program.contents, instruction.reads, instruction.writes
        takes: dict[Tier, int] = defaultdict(int)
        gives: dict[Tier, int] = defaultdict(int)
        for register in writes if contents else ():
            # What an instruction writes over, it takes no memory for.
            if register not in reads:
                takes[contents[register].tier] += contents[register].bytes
        for register in instruction.dead if contents else ():
            gives[contents[register].tier] += contents[register].bytes
        role, seconds, key, replaced = _FREE, 0.0, (-1, 0), 0
        if isinstance(instruction, Compute):
            extra = program.segments[instruction.segment].memory.extra()
            takes["device"] += max(0, extra)
            gives["device"] += extra
            replaced = max(0, -extra)
        if isinstance(instruction, Computing):
            role = _COMPUTE
        elif isinstance(instruction, View):
            role = _VIEW
        elif isinstance(instruction, Collective):
            role = _GATHER if isinstance(instruction, Gather) else _REDUCE
        elif isinstance(instruction, Move):
            role = _MOVE
        elif isinstance(instruction, Wait):
            role = _WAIT
        if isinstance(instruction, Timed):
            seconds = self._seconds(instruction, program.segments)
        if isinstance(instruction, (Gather, WaitGather, Free)):
            key = (instruction.bucket, instruction.tile)
        place = instruction.slot if isinstance(instruction, Move) else None
        fact = _Fact(
            instruction, role, instruction.stream or "compute", seconds, reads, writes,
            tuple(item for item in takes.items() if item[1]), tuple(item for item in gives.items() if item[1]),
            key, place, isinstance(instruction, Free) and instruction.kept,
            isinstance(instruction, Free) and instruction.ends, replaced,
        )  # fmt: skip
        self.known[id(instruction)] = fact
        return fact

    def _seconds(self, instruction: Timed, segments: Sequence[Segment]) -> float:
        known = self.measured.of(instruction, segments) if self.measured is not None else None
        return self.rates.seconds(instruction, segments) if known is None else known


# Numbers and not classes: `walk` is where a search spends its time, on the same instructions over and over.
_COMPUTE, _GATHER, _REDUCE, _MOVE, _WAIT, _FREE, _VIEW = range(7)


LATE = 1 << 62
"""The order of what is taken at a moment, behind all that is given back then."""
Event = tuple[float, int, int, int]
"""A moment, the order of what happens then, the task, and the bytes it takes (or gives, below zero).

A task that ends at a moment gives back before one that starts then takes; only a task without length takes first.
"""


class _Fact(NamedTuple):
    """The facts about an instruction that :func:`walk` needs.

    ``takes`` and ``gives`` hold where every register it names has memory of its own.
    """

    instruction: Instruction
    role: int
    stream: Stream
    seconds: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    takes: Memory
    gives: Memory
    part: tuple[int, int]  # of a gather, its wait and a free: bucket and tile
    slot: int | None
    kept: bool
    ends: bool
    replaced: int  # bytes of what dies in it that are free from its start


@dataclass(slots=True)
class Tasks:
    """The tasks: instructions that occupied a stream, in program order.

    Attributes:
        instructions, after: with their programs, and the tasks that each waited for besides the one before it on its
            stream; empty unless asked for.
        free: by stream, when its last task ends.
        streams: of each task.
        programs: the first task of each program.
        events: by tier, what is taken and given back when.
    """

    instructions: list[tuple[Timed, Program]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    free: dict[Stream, float] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    events: dict[Tier, list[Event]] = field(default_factory=lambda: {tier: [] for tier in TIERS})

    def begin(self, stream: Stream, seconds: float, after: Iterable[int]) -> tuple[float, float]:
        """Start and end of the next task, which starts when its stream is free and all that it waits for has ended."""
        start, ends = self.free.get(stream, 0.0), self.ends
        for task in after:
            if ends[task] > start:
                start = ends[task]
        end = self.free[stream] = start + seconds
        self.starts.append(start)
        self.streams.append(stream)
        ends.append(end)
        return start, end

    def last_of(self, after: Sequence[int], computed: int) -> int:
        """The task that ends last of those in ``after``, which something waits for, and the one that computed before
        it; -1 where there are none."""
        waited = [*after, computed] if computed >= 0 else after
        return max(waited, key=self.ends.__getitem__, default=-1)

    def take(self, tier: Tier, size: int, task: int) -> None:
        """``task`` takes memory at its start."""
        start = self.starts[task]
        self.events[tier].append((start, 2 * task if self.ends[task] == start else LATE, task, size))

    def give(self, tier: Tier, size: int, task: int) -> None:
        """Memory is free at the end of ``task``."""
        self.events[tier].append((self.ends[task], 2 * task + 1, task, -size))

    def hold(self, size: int, gather: int, first: int, last: int, free: bool) -> None:
        """The buffer of ``gather`` holds memory of the device from ``first`` to the end of ``last``, or of all (-1)."""
        self.take("device", size, first)
        if last >= 0:
            self.give("device", size, last)

    def hold_all(self, holdings: Iterable[Holding]) -> dict[Tier, int]:
        """Take and give back ``holdings``; returns the bytes of each tier that are there before the first task."""
        levels: dict[Tier, int] = defaultdict(int)
        for holding in holdings:
            if holding.first == -1:
                levels[holding.tier] += holding.bytes
            else:
                self.take(holding.tier, holding.bytes, holding.first)
            if holding.last != -1:
                self.give(holding.tier, holding.bytes, holding.last)
        return levels

    def described(self) -> Iterator[Span]:
        """Each of them, for people."""
        for index, (instruction, program) in enumerate(self.instructions):
            segment = program.segments[instruction.segment] if isinstance(instruction, Compute) else None
            yield Span(
                task=index,
                name=program.name(instruction),
                stream=instruction.stream or "compute",
                start=self.starts[index],
                end=self.ends[index],
                module=program.module(instruction),
                source=instruction.source if isinstance(instruction, Compute) else "",
                after=self.after[index],
                key=segment.digest if segment is not None else "",
                flops=segment.flops // segment.slices if segment is not None else 0,
                operation=instruction.operation,
                phase=program.kind,
                bucket=-1 if isinstance(instruction, Computing) else instruction.bucket,
                tile=0 if isinstance(instruction, Computing) else instruction.tile,
                what=instruction.what if isinstance(instruction, Move) else "",
                label="" if segment is not None else program.label(instruction),
                token_tiles=instruction.token_tiles if isinstance(instruction, Compute) else 1,
            )


def walk(programs: Sequence[Program], costs: Costs, cells: _Cells | None = None) -> Tasks:
    """Run ``programs``.

    Args:
        cells: told what is alive, where registers may share memory; else each has its own, and nobody asks what waited
            for what.
    """
    run = Tasks()
    starts, ends, events = run.starts, run.ends, run.events
    known, overlaps = costs.known, costs.overlaps
    buffers = None
    if costs.uses_buffers_again:
        buffers = GatherBuffers(run.streams, run.hold if cells is None else cells.hold_buffer)
    coming = buffers.coming if buffers is not None else {}
    whole: dict[tuple[int, int], int] = {}  # bucket and tile -> the task that gathered it
    slots: dict[int, tuple[int, list[int], list[int]]] = {}  # place -> register, who worked there before, and who does
    ready: dict[int, int] = {}  # register -> the task that writes it
    collectives: dict[int, _Fact] = {}  # task -> what is given back when it is waited for
    waits: list[int] = []  # what the next compute waits for
    last = computed = -1  # the task that computed last, and the one before
    for program in programs:
        begin = len(starts)
        run.programs.append(begin)
        if not program.carries:
            ready = {}
        if buffers is not None and program.kind == "backward" and not program.gathers_again:
            buffers.trim(last)
        if cells is not None:
            cells.enter(program, run)
        else:
            for register in program.given:
                content = program.contents[register]
                events[content.tier].append((0.0, -1, begin, content.bytes))
        for each in program.instructions:
            fact = known.get(id(each)) or costs.learn(each, program)
            instruction, role, stream, seconds, reads, writes, takes, gives, part, slot, kept, over, replaced = fact
            if role == _WAIT:
                task = ready[reads[0]]
                waits.append(task)
                for register in writes:
                    ready[register] = task
                if task in coming:
                    buffers.take(part, task, last)  # type: ignore[union-attr]  # else nothing is coming
                begun = collectives.pop(task, None)
                # Where nothing overlaps, the wait is what reads them: they are there until then.
                read = task if overlaps or last < task else last
                if cells is not None:
                    cells.waited(instruction, task, begun, read)
                    continue
                for tier, size in takes:
                    run.take(tier, size, task)
                if begun is not None:
                    for tier, size in begun.gives:
                        events[tier].append((ends[read], 2 * read + 1, read, -size))
                continue
            if role == _FREE:
                gathered = None if kept else whole.pop(part, None)
                if gathered is not None:
                    if cells is not None:
                        # Where nothing has computed yet, the first task stands in.
                        cells.freed(part, max(last, 0))
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
            if role == _VIEW:
                if reads[0] in ready:
                    ready[writes[0]] = ready[reads[0]]
                if cells is not None:
                    cells.viewed(instruction, max(last, 0))
                continue
            task = len(starts)
            if role == _COMPUTE:
                # Only what computes waits here: transfers that stand behind a wait go on by themselves.
                after, waits = waits, []
                computed, last = last, task
            else:
                if role == _GATHER:
                    if part in whole:
                        # It stayed whole: whoever waits for it waits for the gather of before, and nothing is taken.
                        ready[writes[0]] = whole[part]
                        continue
                    whole[part] = task
                    if buffers is not None and takes:
                        coming[task], takes = takes[0][1], ()
                after = [last] if last >= 0 else []
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
            start, end = run.begin(stream, seconds, after)
            if replaced and cells is None:
                # Free when the last ends that it waited for, as what it leaves behind is taken at once.
                ended = run.last_of(after, computed)
                if ended >= 0:
                    events["device"].append((ends[ended], 2 * ended + 1, ended, -replaced))
                else:
                    events["device"].append((start, -1, task, -replaced))
            for register in writes:
                ready[register] = task
            if role == _GATHER or role == _REDUCE:  # noqa: SIM109  twice as fast
                collectives[task] = fact
                if not overlaps:
                    waits.append(task)
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


@dataclass(slots=True, eq=False)
class _Cell:
    """Memory of one storage while it lives; ``readers`` are registers of it that are alive."""

    name: str
    kind: Kind
    tier: Tier
    bytes: int
    task: int
    module: str
    source: str
    register: int
    readers: int = 0
    gathered: bool = False  # which a free ends, whatever reads it
    gone: bool = False


class _Cells:
    """The memory that is alive and its uses, where several registers may refer to the same.

    Attributes:
        holdings: what was alive, with the tasks that hold it.
    """

    def __init__(self, parts: Mapping[int, Callable[[Holding], Iterable[Holding]]]) -> None:
        self.holdings: list[Holding] = []
        self._parts = parts
        self._at: dict[int, _Cell] = {}  # storage -> its memory
        self._saved: dict[str, _Cell] = {}  # by name: what a forward returned
        self._returned: set[str] = set()  # names of all that a forward returned, the user's own tensors too
        self._whole: dict[tuple[int, int], _Cell] = {}  # buckets and tiles
        self._computed = -1  # the last task that computed
        self._replaced = (0, -1)  # bytes of what dies in a task that are free from its start, as this task ends
        self._program: Program | None = None

    def enter(self, program: Program, run: Tasks) -> None:
        """``program`` begins: what it is given was saved by the one before, or is the user's own.

        A backward is given the gradients of outputs too. AOTAutograd makes one of zeros where the loss does not depend
        on an output, as on the logits beside a loss.
        """
        self._leave()
        self._run, self._program = run, program
        for register in program.given:
            content = program.contents[register]
            module = next((program.module(each) for each in program.instructions if register in each.reads), "")
            self._at[content.storage] = _Cell(
                content.name, content.kind, content.tier, content.bytes, -1, module, "", register, readers=1
            )
        if program.carries:
            return
        self._at = {}
        for register in range(program.inputs if program.contents else 0):
            content = program.contents[register]
            if content.name in self._saved:
                self._at[content.storage] = self._saved.pop(content.name)
            elif program.kind == "backward" and content.kind == "input" and content.name not in self._returned:
                begins = len(run.instructions)
                self._at[content.storage] = _Cell(content.name, "gradient", "device", content.bytes, begins, "", "", -1)
            if content.storage in self._at:
                self._at[content.storage].readers += 1

    def ran(self, instruction: Instruction, program: Program, task: int, *, buffered: bool) -> None:
        """``instruction`` takes what it writes at its start, and gives what is dead at its end; a ``buffered`` gather
        takes its buffer later."""
        module, source = program.module(instruction), instruction.source if isinstance(instruction, Compute) else ""
        for register in instruction.writes:
            if register not in instruction.reads:
                self._write(register, task, module, source)
        if isinstance(instruction, Compute):
            memory = program.segments[instruction.segment].memory
            extra = memory.extra(self._dying(instruction, memory.until))
            if extra > 0:
                name = f"work of {program.name(instruction)}"
                self._give(_Cell(name, "temporary", "device", extra, task, module, source, -1), task)
            # It starts when what it waited for last has ended, unless it waited for nothing.
            self._replaced = (max(0, -extra), self._run.last_of(self._run.after[task], self._computed))
        if isinstance(instruction, Gather):
            cell = self._at.get(self._storage(instruction.out))
            if cell is not None:
                cell.gathered, cell.name = True, program.label(instruction)
                self._whole[instruction.bucket, instruction.tile] = cell
                if buffered:
                    cell.bytes = 0  # the buffer is told of by itself
        if not isinstance(instruction, Collective):
            for register in instruction.dead:
                self._die(register, task)
        if isinstance(instruction, Compute):
            self._computed, self._replaced = task, (0, -1)

    def _dying(self, instruction: Compute, until: Mapping[Hashable, int]) -> Iterator[tuple[int, int]]:
        """The inputs of a segment that are free with their last use in it: by position, with bytes."""
        ending = Counter(self._at.get(self._storage(register)) for register in instruction.dead)
        last: dict[_Cell, int] = {}
        for position, register in enumerate(instruction.args):
            cell = self._at.get(self._storage(register))
            if cell is not None and not cell.gone and not cell.gathered and cell.readers == ending[cell]:
                # Of several that look at one memory, the one that is used last.
                last[cell] = max(last.get(cell, position), position, key=lambda at: until.get(at, sys.maxsize))
        return ((position, cell.bytes) for cell, position in last.items())

    def waited(self, instruction: Instruction, task: int, begun: _Fact | None, read: int) -> None:
        """``task`` was waited for, and has filled what ``instruction`` writes."""
        starter, of = self._run.instructions[task]
        module = of.module(starter)
        whole = self._whole.get((instruction.bucket, instruction.tile)) if instruction.operation == "gather" else None
        for register in instruction.writes:
            if whole is not None:
                self._at[self._storage(register)] = whole
            self._write(register, task, module, "")
        for register in (*(begun.instruction.dead if begun is not None else ()), *instruction.dead):
            self._die(register, read)

    def viewed(self, instruction: Instruction, task: int) -> None:
        """Another register refers to memory that is there; ``task`` ran last."""
        for register in instruction.writes:
            self._write(register, task, "", "")
        for register in instruction.dead:
            self._die(register, task)

    def freed(self, part: tuple[int, int], task: int) -> None:
        """A bucket or tile is let go of at the end of ``task``."""
        cell = self._whole.pop(part, None)
        if cell is not None:
            self._give(cell, task)

    def hold_buffer(self, size: int, gather: int, first: int, last: int, free: bool) -> None:
        """The buffer that task ``gather`` filled is its bucket's from ``first`` to ``last``, or ``free``."""
        instruction, program = self._run.instructions[gather]
        name, module = program.label(instruction), program.module(instruction)
        kind: Kind = "temporary" if free else "gathered"
        self.holdings.append(
            Holding(f"free buffer, of {name} before" if free else name, kind, "device", size, first, last, module)
        )

    def finish(self) -> None:
        """Let memory that nothing gave back live to the end."""
        self._leave()
        for cell in dict.fromkeys((*self._saved.values(), *self._whole.values(), *self._at.values())):
            if not cell.gone:
                self._hold(cell, -1)

    def _leave(self) -> None:
        """Let the results of a program live on: saved for the backward, or gradients until the update."""
        program = self._program
        # A sketch's next program finds the same registers, so nothing leaves.
        if program is None or program.carries:
            return
        names: dict[int, list[str]] = {}
        for register in program.outputs if program.contents else ():
            if register is not None:
                names.setdefault(self._storage(register), []).append(program.contents[register].name)
                self._returned.add(program.contents[register].name)
        for storage, cell in self._at.items():
            # A bucket that stays whole is no output; it is known as whole.
            if cell.gathered or cell.gone:
                continue
            cell.readers = 0
            if storage not in names:
                self._give(cell, len(self._run.instructions) - 1)
            elif program.kind == "backward":
                cell.kind = "gradient"
                # Under a name that no input has: the next program must not take it for something saved.
                self._saved[f"gradient {cell.name}"] = cell
            else:
                cell.kind = "activation"
                self._saved.update(dict.fromkeys(names[storage], cell))
        self._at = {}
        self._program = None

    def _storage(self, register: int) -> int:
        assert self._program is not None
        return self._program.contents[register].storage

    def _write(self, register: int, task: int, module: str, source: str) -> None:
        assert self._program is not None
        content = self._program.contents[register]
        cell = self._at.get(content.storage)
        if cell is None or cell.gone:
            if content.storage < self._program.inputs:
                return  # the user's
            cell = _Cell(content.name, content.kind, content.tier, content.bytes, task, module, source, register)
            self._at[content.storage] = cell
        cell.readers += 1

    def _die(self, register: int, task: int) -> None:
        storage = self._storage(register)
        cell = self._at.get(storage)
        if cell is None or cell.gone:
            return
        cell.readers -= 1
        if cell.readers == 0 and not cell.gathered:
            self._give(cell, task)

    def _give(self, cell: _Cell, task: int) -> None:
        cell.gone = True
        room, before = self._replaced
        # By time, not by number: what a transfer brings may have a later task than what computed before.
        there = before >= 0 and (cell.task < 0 or self._run.starts[cell.task] <= self._run.ends[before])
        early = min(room, cell.bytes) if there else 0
        if early:
            # A task takes all at its start: what it leaves behind takes the place of this part.
            self._replaced = (room - early, before)
            self._hold(replace(cell, bytes=early), before)
            cell.bytes -= early
        self._hold(cell, task)

    def _hold(self, cell: _Cell, last: int) -> None:
        if cell.bytes:
            where = (cell.tier, cell.bytes, cell.task, last, cell.module, cell.source)
            holding = Holding(cell.name, cell.kind, *where)
            parts = self._parts.get(cell.register)
            self.holdings += (holding,) if parts is None else parts(holding)


def _forecast(
    spans: tuple[Span, ...], run: Tasks, holdings: Iterable[Holding], not_counted: tuple[str, ...]
) -> Forecast:
    levels = run.hold_all(holdings)
    curves: dict[Tier, tuple[tuple[float, int], ...]] = {}
    peaks: dict[Tier, Peak] = {}
    for tier in sorted({*levels, *(tier for tier, events in run.events.items() if events)}):
        curves[tier], peaks[tier] = _curve(run.events[tier], levels[tier], spans)
    return Forecast(spans, curves, peaks, _critical_path(spans), not_counted)


def _curve(events: list[Event], level: int, spans: Sequence[Span]) -> tuple[tuple[tuple[float, int], ...], Peak]:
    curve = [(0.0, level)]
    peak = Peak(level, -1, "the start of the step")
    for time, _, index, size in sorted(events):
        level += size
        if curve[-1][0] == time:
            curve[-1] = (time, level)
        else:
            curve.append((time, level))
        if level > peak.bytes:
            peak = Peak(level, index, spans[index].name, spans[index].module, spans[index].source)
    return tuple(curve), peak


def _critical_path(spans: Sequence[Span]) -> tuple[int, ...]:
    """A chain of tasks from the step's end back to its start, each of which began when the one before it ended."""
    previous: list[tuple[int, ...]] = []  # on the same stream
    last: dict[Stream, int] = {}
    for span in spans:
        previous.append((last[span.stream],) if span.stream in last else ())
        last[span.stream] = span.task
    path: list[int] = []
    ending = max(spans, key=lambda span: span.end, default=None)
    while ending is not None:
        path.append(ending.task)
        before = (spans[task] for task in (*ending.after, *previous[ending.task]))
        start = ending.start
        # Equal to the last bit: a start is one of these ends, copied and never computed.
        ending = next((span for span in before if span.end == start), None)
    return tuple(reversed(path))
