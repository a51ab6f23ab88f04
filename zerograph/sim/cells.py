"""The memory that is alive while programs run, where several registers may refer to the same, and who holds it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from zerograph.core.files.planfile import Holding
from zerograph.core.instructions import Collective, Compute, Gather, Instruction, WaitGather
from zerograph.core.machine import Tier
from zerograph.core.program import Program
from zerograph.core.step import Kind
from zerograph.sim.costs import Fact
from zerograph.sim.tasks import Tasks


@dataclass(slots=True, eq=False)
class Cell:
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


class Cells:
    """The memory that is alive and its uses, where several registers may refer to the same.

    Attributes:
        holdings: what was alive, with the tasks that hold it.
    """

    def __init__(self, parts: Mapping[int, Callable[[Holding], Iterable[Holding]]]) -> None:
        self.holdings: list[Holding] = []
        self._parts = parts
        self._at: dict[int, Cell] = {}  # storage -> its memory
        self._saved: dict[str, Cell] = {}  # by name: what a forward returned
        self._returned: set[str] = set()  # names of all that a forward returned, the user's own tensors too
        self._unsharded: dict[tuple[int, int], Cell] = {}  # buckets and tiles
        self._kept: dict[int, Cell] = {}  # of buckets, this rank's part of what its host keeps
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
            self._at[content.storage] = Cell(
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
                self._at[content.storage] = Cell(content.name, "gradient", "device", content.bytes, begins, "", "", -1)
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
                self._give(Cell(name, "temporary", "device", extra, task, module, source, -1), task)
            # It starts when what it waited for last has ended, unless it waited for nothing.
            self._replaced = (max(0, -extra), self._run.last_of(self._run.after[task], self._computed))
        if isinstance(instruction, Gather):
            cell = self._at.get(self._storage(instruction.out))
            if cell is not None:
                cell.gathered, cell.name = True, program.label(instruction)
                self._unsharded[instruction.bucket, instruction.tile] = cell
                if buffered:
                    cell.bytes = 0  # the buffer is listed by itself
        if not isinstance(instruction, Collective):
            for register in instruction.dead:
                self._die(register, task)
        if isinstance(instruction, Compute):
            self._computed, self._replaced = task, (0, -1)

    def _dying(self, instruction: Compute, until: Mapping[Hashable, int]) -> Iterator[tuple[int, int]]:
        """The inputs of a segment that are free with their last use in it: by position, with bytes."""
        ending = Counter(self._at.get(self._storage(register)) for register in instruction.dead)
        last: dict[Cell, int] = {}
        for position, register in enumerate(instruction.reads):
            cell = self._at.get(self._storage(register))
            if cell is not None and not cell.gone and not cell.gathered and cell.readers == ending[cell]:
                # Of several that look at one memory, the one that is used last.
                last[cell] = max(last.get(cell, position), position, key=lambda at: until.get(at, sys.maxsize))
        return ((position, cell.bytes) for cell, position in last.items())

    def waited(self, instruction: Instruction, task: int, begun: Fact | None, read: int) -> None:
        """``task`` was waited for, and has filled what ``instruction`` writes."""
        starter, of = self._run.instructions[task]
        module = of.module(starter)
        known = (
            self._unsharded.get((instruction.bucket, instruction.tile)) if instruction.operation == "gather" else None
        )
        for register in instruction.writes:
            if known is not None:
                self._at[self._storage(register)] = known
            self._write(register, task, module, "")
        if isinstance(instruction, WaitGather) and instruction.kept:
            name = f"{of.label(starter)}, kept in this host"
            if before := self._kept.pop(instruction.bucket, None):
                self._give(before, read)  # which no backward has gathered
            self._kept[instruction.bucket] = Cell(
                name, "gathered", "device", instruction.kept, task, module, "", -1, gathered=True
            )
        if begun is not None and isinstance(begun.instruction, Gather) and begun.instruction.ended:
            kept = self._kept.pop(begun.instruction.bucket, None)
            if kept is not None:  # a backward that is simulated alone finds none
                self._give(kept, read)
        for register in (*(begun.instruction.dead if begun is not None else ()), *instruction.dead):
            self._die(register, read)

    def viewed(self, instruction: Instruction, task: int) -> None:
        """Another register refers to memory that is there; ``task`` ran last."""
        for register in instruction.writes:
            self._write(register, task, "", "")
        for register in instruction.dead:
            self._die(register, task)

    def freed(self, part: tuple[int, int], task: int, *, kept: bool) -> None:
        """A bucket or tile is let go of at the end of ``task``; what is ``kept`` of it dies with its last reader."""
        cell = self._unsharded.pop(part, None)
        if cell is not None and kept:
            cell.gathered, cell.readers = False, 1
        elif cell is not None:
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
        held = (*self._saved.values(), *self._unsharded.values(), *self._kept.values(), *self._at.values())
        for cell in dict.fromkeys(held):
            if not cell.gone:
                self._hold(cell, -1)

    def _leave(self) -> None:
        """Let the results of a program live on: saved for the backward, or gradients until the update."""
        program = self._program
        # The next coarse program finds the same registers, so nothing leaves.
        if program is None or program.carries:
            return
        names: dict[int, list[str]] = {}
        for register in program.outputs if program.contents else ():
            if register is not None:
                names.setdefault(self._storage(register), []).append(program.contents[register].name)
                self._returned.add(program.contents[register].name)
        for storage, cell in self._at.items():
            # A bucket that stays resident is no output; it is known as resident.
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
            cell = Cell(content.name, content.kind, content.tier, content.bytes, task, module, source, register)
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

    def _give(self, cell: Cell, task: int) -> None:
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

    def _hold(self, cell: Cell, last: int) -> None:
        if cell.bytes:
            where = (cell.tier, cell.bytes, cell.task, last, cell.module, cell.source)
            holding = Holding(cell.name, cell.kind, *where)
            parts = self._parts.get(cell.register)
            self.holdings += (holding,) if parts is None else parts(holding)
