"""The optimizer's update as instructions: of buckets whose states live off the device, and of all the rest.

Where optimizer states live off the device, updates run on the host as a pipeline: gradients that stayed on the device
come down, states on a disk are read, updated and written through at most :data:`SLOTS` staging buffers, and new
parameters go up again where they live on the device. Or they run on the device, through which states on the host pass
in as many buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

from zerograph.core.instructions import (
    BeginUpdate,
    DeviceUpdate,
    Free,
    Gather,
    HostUpdate,
    Instruction,
    Move,
    OffDevice,
    WaitFetch,
    WaitReduce,
)
from zerograph.core.machine import is_disk
from zerograph.core.plan import Bucket, Placement, Plan
from zerograph.core.plan import Update as UpdatePlace
from zerograph.core.program import Program
from zerograph.core.slots import LEAVING, SLOTS
from zerograph.core.step import Kind
from zerograph.planner.programs.placement import STATES_OFFLOADED, BucketPart, bucket_parts, device_update
from zerograph.planner.programs.registers import Registers
from zerograph.sim.rates import Rates


class Buckets(Protocol):
    """The registers that an update needs, and how fast the machine is."""

    rates: Rates
    registers: Registers


def slot_of(scheduler: Buckets, ring: str, number: int) -> int:
    """The register of the staging buffer that the ``number``-th of those works in that share a ring."""
    tier, name = scheduler.rates.staging, "staging buffer"
    place = scheduler.registers.get((ring, number % SLOTS), name, 0, "temporary", tier)
    return scheduler.registers.get((ring, number), name, 0, "temporary", tier, storage=place)


def update_offloaded(
    scheduler: Buckets,
    part: BucketPart,
    where: UpdatePlace,
    placement: Placement,
    number: int,
    arrived: tuple[int, ...],
    norm: int,
) -> list[OffDevice]:  # fmt: skip
    """The update of a bucket or tile whose states live off the device, computed there or on the device; the other
    arguments are those of :func:`host_update`."""
    update = _update_through_device if where == "device" and placement.optimizer == "host" else host_update
    return update(scheduler, part, placement, number, arrived, norm)


def update_beside(
    scheduler: Buckets, part: BucketPart, placement: Placement, number: int,
    gradients: tuple[int, ...], kept: tuple[int, ...] = (), let_go: tuple[int, ...] = (),
) -> tuple[list[OffDevice], tuple[int, ...]]:  # fmt: skip
    """:func:`host_update` beside a backward, or beside a forward by gradients of the step before: these go with it, and
    with a backward those of the parameters that are ``let_go``. Also the registers of its ends, behind which the
    parameters are gathered."""
    made = host_update(scheduler, part, placement, number, gradients, -1, kept)
    reader = max(at for at, each in enumerate(made) if gradients[-1] in each.reads)
    made[reader] = replace(made[reader], dead=(*made[reader].dead, *gradients))
    update = next(at for at, each in enumerate(made) if isinstance(each, HostUpdate))
    made[update] = replace(made[update], dead=(*made[update].dead, *let_go))
    return made, _ends(scheduler, made, part)


def _ends(scheduler: Buckets, made: list[OffDevice], part: BucketPart) -> tuple[int, ...]:
    """Let each of ``made`` that changes anything write its end; returns these registers, the update's first."""
    ends = list[int]()
    for at, each in enumerate(made):
        if each.operation not in ("read", "spill"):
            name = f"end of the {each.operation} of {each.label}"
            ends.append(scheduler.registers.get(("end", each.operation, *part.place), name, 0, "temporary"))
            made[at] = replace(each, writes=(*each.writes, ends[-1]))
    return tuple(ends)


def update_late(
    scheduler: Buckets, part: BucketPart, placement: Placement, number: int, gradient: int
) -> tuple[list[OffDevice], tuple[int, ...]]:
    """The update on the host beside a whole step, by a gradient of the step before, and the registers of its ends."""
    own = replace(placement, parameters="host")  # copies elsewhere wait for that
    made = host_update(scheduler, part, own, number, (gradient,), -1)
    return made, _ends(scheduler, made, part)


def follow_late(
    scheduler: Buckets, part: BucketPart, placement: Placement, ends: tuple[int, ...], norm: int
) -> list[Instruction]:
    """Wait for the ``ends`` of :func:`update_late` behind the step beside which that ran, and let the copies follow."""
    behind: list[Instruction] = [WaitFetch(end) for end in ends]
    if placement.parameters == "device":
        size, reads = part.shards.at(placement).copies, (*ends[:1], norm) if norm >= 0 else ends[:1]
        behind.append(
            Move("host", "device", "parameters", part.label, part.name, size, reads, (), (), part.bucket, part.tile)
        )
    return behind


def _update_through_device(
    scheduler: Buckets, part: BucketPart, placement: Placement, number: int, arrived: tuple[int, ...], norm: int
) -> list[OffDevice]:
    """The update on the device of a bucket or tile whose states live on the host, where its gradient is too."""
    gradient, placed = part.shards.gradient, part.shards.at(placement)
    (bucket, tile, tiles), module = part.place, part.name
    slot, beside = slot_of(scheduler, "update", number), placement.parameters == "host"

    def here(what: str, size: int, kind: Kind) -> tuple[int, ...]:
        key = ("on the device", what, *part.place)
        return (scheduler.registers.get(key, f"{what} of {part.label} on the device", size, kind),) if size else ()

    # New parameters that live on the device are written there; what has no copy passes through like states.
    states = placed.optimizer + placed.shared * beside
    gradients, held = here("gradient", gradient, "gradient"), here("states", states, "state")
    copy = here("copy", placed.copies * beside, "param")
    start = (norm,) if norm >= 0 else ()
    what, label, up, down = "states", part.label, states + gradient, states + placed.copies * beside
    came = (*held, *gradients)
    return [
        Move("host", "device", what, label, module, up, (*start, *arrived), came, (), bucket, tile, slot),
        DeviceUpdate(
            label, module, placed.traffic, came, (*held, *copy), gradients, bucket, tile, slot, part.updated, tiles
        ),
        Move("device", "host", what, label, module, down, (*held, *copy), (), (*held, *copy), bucket, tile, slot),
    ]  # fmt: skip


def host_update(
    scheduler: Buckets, part: BucketPart, placement: Placement, number: int, arrived: tuple[int, ...], norm: int,
    kept: tuple[int, ...] = (),
) -> list[OffDevice]:  # fmt: skip
    """The update of a bucket or tile whose states live off the device.

    Args:
        number: of host updates before it.
        arrived: the registers of its gradient, wherever that is.
        norm: the register that is ready when all gradients are; -1 where there are none.
        kept: registers of its parameters, which are read from there and not from a disk.
    """
    gradient, placed = part.shards.gradient, part.shards.at(placement)
    (bucket, tile, tiles), label, module = part.place, part.label, part.name
    staging, slot = scheduler.rates.staging, slot_of(scheduler, "update", number)
    start = (norm,) if norm >= 0 else ()
    # An update on the host reads and writes memory of the host: all else passes a staging buffer.
    in_place = {"host", staging}
    copies = placement.spilled not in in_place

    def staged(what: str, size: int, kind: Kind) -> tuple[int, ...]:
        key = ("staged", what, *part.place)
        name = f"staged {what} of {label}"
        # On a CPU all of it passes through slots, which are held from step to step.
        held = size if staging != "device" else 0
        return (scheduler.registers.get(key, name, held, kind, staging),) if size else ()

    instructions: list[OffDevice] = []
    gradients = staged("gradient", gradient, "gradient") if copies else ()
    # Parameters without a copy are read and written like states, where they live on a disk.
    shared = placed.shared * is_disk(placement.parameters)
    states = staged("states", placed.optimizer + shared, "state") if placement.optimizer not in in_place else ()
    if placement.spilled == "device" and copies:
        reads = (*start, *arrived)
        instructions.append(
            Move("device", "host", "gradient", label, module, gradient, reads, gradients, (), bucket, tile, slot)
        )
    # None is farther than the optimizer's tier, so that all of a bucket that is on a disk is on that one.
    disk, spilled, leaves = placement.optimizer, is_disk(placement.gradients), is_disk(placement.parameters)
    read, kept_bytes = states + gradients * spilled, sum(scheduler.registers.contents[r].bytes for r in kept)
    size = (placed.optimizer + shared - min(shared, kept_bytes)) * bool(states) + gradient * spilled
    if size:
        reads = (*start, *(() if placement.gradients == "device" else arrived))
        instructions.append(Move(disk, "host", "states", label, module, size, reads, read, (), bucket, tile, slot))
    copy = staged("copy", placed.copies, "param") if placement.parameters not in in_place else ()
    inputs = (*start, *(() if copies else arrived), *gradients, *(states if size else ()), *kept)
    instructions.append(
        HostUpdate(
            label, module, placed.traffic, inputs, (*states, *copy), gradients, bucket, tile, slot,
            updated=part.updated, tiles=tiles,
        )
    )  # fmt: skip
    if states:
        writes = states + copy * leaves
        size = placed.optimizer + shared + placed.copies * leaves
        instructions.append(Move("host", disk, "states", label, module, size, writes, (), writes, bucket, tile, slot))
    if placement.parameters == "device" and copy:
        instructions.append(
            Move("host", "device", "parameters", label, module, placed.copies, copy, (), copy, bucket, tile, slot)
        )
    return instructions


def update_program(
    plan: Plan,
    state_sizes: Mapping[str, int],
    streams: Rates | None = None,
    backward: Program | None = None,
    inside: Sequence[int] = (),
    others: tuple[int, ...] = (),
) -> Program:
    """The optimizer's update of the parameters in ``state_sizes``
    (:func:`~zerograph.core.param_bytes.sizes_of_states`).

    With ``streams``, the rates of a machine, states off the device are updated there, bucket by bucket, when what moves
    their gradients off the device in ``backward`` has ended; those ``inside`` of it are updated there.
    Without, all of it is one instruction, as a recording sees it. ``others`` are bytes of updates of parameters in no
    bucket.
    """
    names, instructions = tuple(bucket.name for bucket in plan.buckets), list[Instruction]()
    registers, arrived = Registers(backward.contents if backward is not None else ()), dict[int, tuple[int, ...]]()
    for each in backward.instructions if backward is not None else ():
        if isinstance(each, Move) and each.what == "gradient" and not each.rises:
            arrived[each.bucket] = each.writes
    offloaded = list[int]()
    if streams is not None:
        known = _Known(names, streams, registers, plan.buckets, state_sizes)
        there = (b.index for b in plan.buckets if b.placement.optimizer != "device" and b.index not in inside)
        offloaded = [index for index in there if known.part(index).shards.at(STATES_OFFLOADED).optimizer]
        for number, bucket in enumerate(offloaded):
            placement = plan.buckets[bucket].placement
            instructions += update_offloaded(
                known, known.part(bucket), plan.update, placement, number, arrived.get(bucket, ()), -1
            )
    on_device = device_update([bucket.params for bucket in plan.buckets], [*offloaded, *inside], state_sizes)
    on_device = replace(on_device, sizes=on_device.sizes + others)
    if on_device.sizes or not (offloaded or inside):
        last = streams is not None and streams.staging != "device"
        instructions.insert(len(instructions) if last else 0, on_device)  # as coarse programs have it
    contents, segments = tuple(registers.contents), backward.segments if backward is not None else ()
    return Program(
        "update", 0, len(contents), tuple(instructions), (), segments, contents, names, carries=backward is not None
    )


def with_updates_inside(
    backward: Program, plan: Plan, state_sizes: Mapping[str, int], rates: Rates
) -> tuple[Program, tuple[int, ...]]:
    """``backward`` with the updates of states off the device that an optimizer begins inside of it where ``plan`` says
    so, and the buckets that these are of. The others' are behind it."""
    registers, gradients, found = Registers(backward.contents), dict[int, tuple[int, ...]](), list[int]()
    known = _Known(backward.buckets, rates, registers, plan.buckets, state_sizes)
    inside = {b.index for b in plan.buckets if plan.updated_inside(b) and b.placement.optimizer != "device"}
    read = deque[tuple[int, ...]]()  # what updates have read, and is there
    kept = {i.bucket: i.writes for i in backward.instructions if isinstance(i, Move) and i.kept and i.bucket in inside}
    instructions = list[Instruction]()
    for each in _with_kept(backward, kept):
        match each:
            case WaitReduce(updatable=[_, *_]) if each.bucket in inside:
                own = tuple(each.writes[k] for k in each.updatable)
                gradients[each.bucket] = gradients.get(each.bucket, ()) + own
            case Move(what="gradient", rises=False) if each.bucket in inside:
                if set(gradients.get(each.bucket, ())).issuperset(each.reads):
                    continue  # the update takes what would leave
                gradients[each.bucket] = each.writes
            case BeginUpdate(bucket=bucket) if bucket in gradients:
                placement = plan.placement_of(plan.buckets[bucket])
                part, own = known.part(bucket), kept.get(bucket, ())
                read.append(own)
                # As many updates may be under way in front of this one.
                let_go = read.popleft() if len(read) > LEAVING else ()
                instructions += update_beside(known, part, placement, len(found), gradients[bucket], own, let_go)[0]
                found.append(bucket)
        instructions.append(each)
    if any(read):
        last = max(at for at, each in enumerate(instructions) if isinstance(each, HostUpdate))
        update: Any = instructions[last]
        instructions[last] = replace(update, dead=(*update.dead, *chain.from_iterable(read)))
    contents = tuple(registers.contents)
    program = replace(backward, instructions=tuple(instructions), contents=contents, registers=len(contents))
    return program, tuple(found)


def _with_kept(backward: Program, kept: Mapping[int, tuple[int, ...]]) -> Iterator[Instruction]:
    """The instructions, of which none before an update lets go of the registers that are ``kept`` for it, by bucket."""
    alive, lone = set(chain.from_iterable(kept.values())), set[int]()
    for each in backward.instructions:
        if isinstance(each, Gather) and backward.contents[each.out].storage in kept.get(each.bucket, ()):
            lone.add(each.bucket)  # a lone rank computes with what it has fetched
        if isinstance(each, Free) and each.bucket in lone:
            yield replace(each, kept=True)
        elif alive.isdisjoint(each.dead):
            yield each
        else:
            yield replace(each, dead=tuple(r for r in each.dead if r not in alive))


@dataclass(slots=True)
class _Known:
    """Buckets whose optimizer is known: bytes that it keeps are given, not assumed."""

    names: Sequence[str]
    rates: Rates
    registers: Registers
    buckets: Sequence[Bucket]
    state_sizes: Mapping[str, int]

    def part(self, bucket: int) -> BucketPart:
        """The bucket, as a whole."""
        params = self.buckets[bucket].params
        (part,) = bucket_parts(bucket, self.names[bucket], params, 1, {}, self.rates, 0)
        states = sum(self.state_sizes.get(p.name, 0) for p in params if p.sharded)
        return replace(part, shards=replace(part.shards, moments=states))
