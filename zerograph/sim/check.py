"""Rules that the programs of a step must keep, whoever built them, instruction by instruction. No torch in here.

Those of the design's invariants that programs tell: every read finds its value on the tier that it needs; gathers and
frees balance, nothing is used after it is free, and no bucket is gathered while it is unsharded. By a plan more is true
of a whole step (:mod:`zerograph.sim.check_step`): every trained shard is reduced once and updated once. Peaks are
listed by :mod:`zerograph.sim.simulate`, and that ranks agree by the digest of a program's collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zerograph.core.errors import InvariantError
from zerograph.core.instructions import (
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    Update,
    Wait,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.machine import Tier, is_disk
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.sim.check_step import STEP_CHECKS, Wrong, check_step

CHECKS: Mapping[str, str] = {
    "reads": "what is read was made before, and lies on the tier where it is read",
    "gathers": "gathers and frees balance, and nothing is gathered while it is whole",
    **{name: sentence for name, (sentence, _) in STEP_CHECKS.items()},
}
"""Name of a check, and what it makes sure of; those behind the first two by a plan."""


def check_programs(programs: Sequence[Program], plan: Plan | None = None) -> list[Wrong]:
    """Everything that is wrong with ``programs``, which run one after another; empty when nothing is.

    Args:
        plan: whose step they are, where they are a whole training step: all that it trains is reduced and updated.
    """
    checked = _Check()
    found = [wrong for program in programs for wrong in checked.program(program)]
    found += checked.ended(programs)
    return found + list(check_step(programs, plan) if plan is not None else ())


def require_programs(programs: Sequence[Program], hint: str) -> None:
    """Refuse programs with which anything is wrong.

    Raises:
        InvariantError: naming the first instructions; ends with ``hint``.
    """
    wrong = check_programs(programs)
    if wrong:
        shown = [f"  {each}" for each in wrong[:_SHOWN]]
        shown += [f"  and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN)
        raise InvariantError("these programs cannot run:\n" + "\n".join(shown), hint)


_SHOWN = 5
"""The number of mistakes that an error names; more are counted."""


class _Check:
    def __init__(self) -> None:
        self.alive: set[int] = set()  # registers that are written and not dead
        self.dead: set[int] = set()
        self.unsharded: set[tuple[int, int]] = set()
        self.resident: set[tuple[int, int]] = set()  # those that stay resident for a later program
        self.keeps: dict[tuple[int, int], bool] = {}  # whether the last wait for it said so

    def program(self, program: Program) -> Iterator[Wrong]:
        """The mistakes of one of them."""
        # Lowered programs have registers of their own; coarse programs go on with those of the one before.
        if not program.carries:
            self.alive, self.dead = set(range(program.inputs)), set()
        self.alive.update(program.given)
        for place, instruction in enumerate(program.instructions):
            for message in self._registers(program, instruction):
                yield Wrong.at("reads", program, place, message)
            for message in self._bucket(instruction):
                yield Wrong.at("gathers", program, place, message)

    def ended(self, programs: Sequence[Program]) -> Iterator[Wrong]:
        """The mistakes that only all of them show."""
        read = {register for program in programs for each in program.instructions for register in each.reads}
        for program in programs:
            for register in set(program.given) - read:
                name = program.contents[register].name
                yield Wrong("reads", f"the {program.kind} is given {name}, and nothing reads it", program=program.kind)

    def _registers(self, program: Program, instruction: Instruction) -> Iterator[str]:
        needs = _needs(instruction)
        for register in instruction.reads:
            if isinstance(instruction, Wait) and register in self.dead:
                continue  # for a transfer can be waited when what it brought has left again
            if register not in self.alive:
                name = program.contents[register].name if program.contents else f"register {register}"
                yield f"reads {name}, which is {'free' if register in self.dead else 'not there'}"
            elif register in instruction.writes:
                continue  # it is written into what is there
            # What holds no bytes (a size, a constant) lives nowhere.
            elif program.contents and needs is not None and program.contents[register].bytes:
                tier = program.contents[register].tier
                if tier not in needs:
                    yield f"reads {program.contents[register].name} on {tier}, and needs it on {' or '.join(needs)}"
        for register in instruction.writes:
            # An instruction may write over what it reads: an update in its staging slot does.
            if register in self.alive and register not in instruction.reads:
                yield f"writes register {register}, which is not free"
            self.alive.add(register)
            self.dead.discard(register)
        for register in instruction.dead:
            if register not in self.alive:
                yield f"lets go of register {register}, which is not there"
            self.alive.discard(register)
            self.dead.add(register)

    def _bucket(self, instruction: Instruction) -> Iterator[str]:
        match instruction:
            case Gather():
                part = instruction.bucket, instruction.tile
                # The executor skips the gather of a bucket that stays resident; its graph has it all the same.
                if part in self.unsharded and part not in self.resident:
                    yield "begins while it is whole"
                self.unsharded.add(part)
            case WaitGather():
                part = instruction.bucket, instruction.tile
                if part not in self.unsharded:
                    yield "is waited for, and has not begun"
                self.keeps[part] = instruction.resident
            case Free():
                part = instruction.bucket, instruction.tile
                if part not in self.unsharded:
                    yield "is let go of, and is not whole"
                resident, ends = instruction.resident, instruction.ends
                if resident != self.keeps.pop(part, resident) or (resident and ends):
                    yield "is kept by one instruction and let go of by another"
                if resident:
                    self.resident.add(part)
                else:
                    self.resident.discard(part)
                    self.unsharded.discard(part)


def _needs(instruction: Instruction) -> tuple[Tier, ...] | None:
    """The tiers on which ``instruction`` finds what it reads; None where that may be anywhere."""
    match instruction:
        case Move(source=source, target=target):
            if is_disk(target):
                return ("host", "device")  # on a CPU these are one
            return (source,) if not is_disk(source) else None
        case HostUpdate():
            return ("host", "device")
        case Update() | WaitReduce() | WaitFetch():
            return None
        case _:
            return ("device",)
