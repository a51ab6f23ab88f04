"""The parts of gathered buckets that the ranks of a host keep between them, from the forward to the backward: which
gathers find them, and which one is the last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from zerograph.core.instructions import Gather, Instruction, WaitGather
from zerograph.core.param_bytes import kept_in_host
from zerograph.core.plan import Plan


def with_host_parts(
    instructions: list[Instruction], plan: Plan, kind: str, made: dict[Any, Any] | None = None
) -> list[Instruction]:
    """``instructions`` of a program of this kind, where those of buckets with residency "host" say what they keep.

    The first gather of a forward brings a bucket from all hosts. Others need those of this host only, the last one of a
    backward for the last time.

    Args:
        made: the instructions that were made before, which further programs share.
    """
    hosted = {bucket.index: bucket.params for bucket in plan.buckets if bucket.residency == "host"}
    if not hosted or kind not in ("forward", "backward"):
        return instructions
    made = {} if made is None else made
    last = {each.bucket: place for place, each in enumerate(instructions) if isinstance(each, Gather)}
    found, coming, there = list[Instruction](), dict[int, int](), set[int]()
    for place, each in enumerate(instructions):
        if isinstance(each, Gather) and each.bucket in hosted:
            # Of all parameters, whichever of them a program reads: what one takes another gives.
            size = kept_in_host(hosted[each.bucket], plan.hosts)
            if kind == "backward" or each.bucket in there:
                ended = size if kind == "backward" and last[each.bucket] == place else 0
                each = _stated(made, each, inside=True, ended=ended)
            else:
                there.add(each.bucket)
                coming[each.bucket] = size
        elif isinstance(each, WaitGather) and each.bucket in coming:
            each = _stated(made, each, kept=coming.pop(each.bucket))
        found.append(each)
    return found


def _stated(made: dict[Any, Any], instruction: Instruction, **facts: Any) -> Instruction:
    """``instruction`` with these facts."""
    key = (instruction, *facts.items())
    if key not in made:
        made[key] = replace(instruction, **facts)
    found: Instruction = made[key]
    return found
