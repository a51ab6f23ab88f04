"""Programs as data for JSON, column by column, and back. No torch in here.

Instructions name their parameters by place in one list of all. A program that carries the registers of the one before
it lists only those that it adds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, get_args

from zerograph.core.files.columns import from_mixed_table, from_table, mixed_table, table
from zerograph.core.instructions import Compute, Instruction, Move
from zerograph.core.layout import Layout
from zerograph.core.machine import LINKS
from zerograph.core.plan import Param, ParamTile
from zerograph.core.program import Program, Register, Segment
from zerograph.core.segment_profile import SegmentProfile


def programs_data(programs: Sequence[Program]) -> dict[str, Any]:
    """The data that :func:`programs_of` reads."""
    params: dict[Param, int] = {}

    def place(param: Param) -> int:
        return params.setdefault(param, len(params))

    found = []
    registers = segments = 0  # of the program before
    for program in programs:
        known = (registers, segments) if program.carries else (0, 0)
        registers, segments = len(program.contents), len(program.segments)
        described: list[Any] = [replace(s, memory=_memory_data(s.memory)) for s in program.segments[known[1] :]]  # type: ignore[arg-type]
        found.append(
            {
                "kind": program.kind,
                "inputs": program.inputs,
                "registers": program.registers,
                "instructions": mixed_table(_with_params(each, place) for each in program.instructions),
                "outputs": list(program.outputs),
                "segments": table(Segment, described),
                "contents": table(Register, program.contents[known[0] :]),
                "buckets": list(program.buckets),
                "carries": program.carries,
                "given": list(program.given),
            }
        )
    laid = (replace(p, home=(p.home.part, p.home.ranks)) for p in params)  # type: ignore[arg-type]
    return {"params": mixed_table(laid), "programs": found}


def programs_of(data: dict[str, Any]) -> tuple[Program, ...]:
    """The programs that :func:`programs_data` was given.

    Raises:
        KeyError, IndexError, TypeError, ValueError, AttributeError: there are none.
    """
    laid = from_mixed_table((Param, ParamTile), data["params"])
    params = [replace(p, home=Layout(*p.home)) for p in laid]
    found: list[Program] = []
    for part in data["programs"]:
        segments, contents = (found[-1].segments, found[-1].contents) if part["carries"] and found else ((), ())
        added = (replace(s, memory=_profile(*s.memory)) for s in from_table(Segment, part["segments"]))
        instructions = from_mixed_table(get_args(Instruction), part["instructions"])
        program = Program(
            kind=part["kind"],
            inputs=part["inputs"],
            registers=part["registers"],
            instructions=tuple(_with_params(each, params.__getitem__) for each in instructions),
            outputs=tuple(part["outputs"]),
            segments=(*segments, *added),
            contents=(*contents, *from_table(Register, part["contents"])),
            buckets=tuple(part["buckets"]),
            carries=part["carries"],
            given=tuple(part["given"]),
        )
        _require_places(program)
        if found and program.given:
            raise ValueError(f"the {program.kind} is given registers, which only the first program of a step is")
        found.append(program)
    return tuple(found)


def _with_params(instruction: Any, change: Callable[[Any], Any]) -> Any:
    """``instruction`` with other things in place of its parameters."""
    if not getattr(instruction, "params", ()):
        return instruction
    return replace(instruction, params=tuple(map(change, instruction.params)))


def _memory_data(memory: SegmentProfile) -> list[Any]:
    return [memory.levels, memory.begins, memory.left, list(memory.until.items())]


def _profile(levels: list[int], begins: list[int], left: int, until: list[tuple[Hashable, int]]) -> SegmentProfile:
    return SegmentProfile(tuple(levels), tuple(begins), left, dict(until))


def _require_places(program: Program) -> None:
    """Refuse registers and segments that ``program`` does not have, before anything looks them up."""
    given = program.given
    if len(set(given)) < len(given) or not all(type(r) is int and 0 <= r < len(program.contents) for r in given):
        raise ValueError(f"the {program.kind} is given registers that are not there, or one twice")
    for at, each in enumerate(program.instructions):
        if not all(0 <= register < len(program.contents) for register in (*each.reads, *each.writes, *each.dead)):
            raise ValueError(f"{program.kind} instruction {at} names a register that is not there")
        if isinstance(each, Move) and (each.source, each.target) not in LINKS:
            raise ValueError(f"{program.kind} instruction {at} moves bytes from {each.source} to {each.target}")
        if not -1 <= getattr(each, "bucket", -1) < max(1, len(program.buckets)):
            raise ValueError(f"{program.kind} instruction {at} names bucket {each.bucket}, which is not there")  # type: ignore[union-attr]
        if isinstance(each, Compute) and not 0 <= each.segment < len(program.segments):
            raise ValueError(f"{program.kind} instruction {at} names segment {each.segment}, which is not there")
