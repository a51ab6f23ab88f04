"""Accumulation: one ``backward()`` for each of several micro-batches, then one update.

The last micro-batch is forecast with the update, beside the gradients that those before it have left. Each of these
takes the seconds of the last one's forward and backward; at stages 0 and 1 nothing is gathered or reduced in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zerograph.core.files.planfile import Holding
from zerograph.core.instructions import Collective, WaitGather, WaitReduce
from zerograph.core.param_bytes import shard_bytes
from zerograph.core.plan import Plan
from zerograph.core.program import Program
from zerograph.core.step import ITEM_SIZE
from zerograph.sim.costs import Costs
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import walk


def gradients_left(plan: Plan) -> Iterator[Holding]:
    """The gradients on the device of earlier micro-batches, to which those of the next are added: whole ones below
    stage 2. Those that are spilled are given to programs."""
    for bucket in plan.buckets:
        for param in (param for param in bucket.params if param.trainable):
            if plan.stage > 1 and param.sharded and bucket.placement.spilled != "device":
                continue
            full = param.elements * ITEM_SIZE[param.reduce_dtype]
            size = shard_bytes(param) if plan.stage > 1 else full
            yield Holding(f"gradient of {param.name}", "gradient", "device", size, -1, -1)


def earlier_passes(programs: Sequence[Program], plan: Plan) -> list[Program]:
    """Forward and backward of ``programs`` as they run before the last micro-batch."""
    passes = [one for one in programs if one.kind != "update"]
    return [_without_collectives(one) for one in passes] if plan.stage < 2 else passes


def seconds_of_passes(programs: Sequence[Program], plan: Plan, rates: Rates) -> float:
    """Seconds of :func:`earlier_passes`."""
    return max(walk(earlier_passes(programs, plan), Costs(rates)).ends, default=0.0)


def _without_collectives(program: Program) -> Program:
    """Whole gradients are added up, and parameters stay resident."""
    kept = [one for one in program.instructions if not isinstance(one, (Collective, WaitGather, WaitReduce))]
    return replace(program, instructions=kept)
