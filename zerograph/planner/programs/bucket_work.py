"""Instructions and registers of one bucket or tile, and of saved activations, in coarse programs. Each is made once
from what tells it apart, for a scheduler and those of variants of its step with the same buckets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from zerograph.core.instructions import (
    Compute,
    Free,
    Gather,
    Instruction,
    Move,
    Reduce,
    WaitFetch,
    WaitGather,
    WaitReduce,
)
from zerograph.core.machine import Tier, hops, is_disk
from zerograph.core.plan import Placement
from zerograph.core.step import Kind, layer_of_activation
from zerograph.planner.programs.placement import BucketPart
from zerograph.planner.programs.schedule import Scheduler


def unsharded_register(scheduler: Scheduler, part: BucketPart, own: Placement | None) -> int:
    """The register of a gathered bucket or tile; where it has its ``own`` placement, this rank's slice is held
    anyway."""
    size = part.unsharded
    if own is not None:
        placed = part.shards.at(own)
        size -= placed.in_place if scheduler.rates.world_size == 1 else placed.copies
    return scheduler.registers.get(("unsharded", *part.place, own), part.label, size, "gathered", bucket=part.bucket)


def full_gradient(scheduler: Scheduler, part: BucketPart) -> int:
    """The register of the full gradient of a tile."""
    name = f"full gradient of {part.label}"
    return scheduler.registers.get(("tile", *part.place), name, part.gradients, "gradient", bucket=part.bucket)


def reduced_gradient(scheduler: Scheduler, part: BucketPart, leaves: bool) -> int:
    """The register of this rank's shards of reduced gradients; of some that ``leaves``, those that leave the device."""
    size = part.shards.gradient if leaves else part.reduced
    key = ("reduced", *part.place, leaves)
    return scheduler.registers.get(key, f"gradient of {part.label}", size, "gradient", bucket=part.bucket)


def offloaded_gradient(scheduler: Scheduler, part: BucketPart, tier: Tier) -> int:
    """The register of reduced gradients that have left the device for ``tier``."""
    key, name = ("into", *part.place, tier), f"gradient of {part.label}"
    return scheduler.registers.get(key, name, part.shards.gradient, "gradient", tier, bucket=part.bucket)


def earlier_gradients(scheduler: Scheduler, part: BucketPart, tier: Tier) -> tuple[int, ...]:
    """The registers of reduced gradients of the step before, beside those that this step makes: on ``tier`` those that
    leave for it, and on the device the others."""
    leaves = part.shards.gradient if tier != "device" else 0
    key, name = ("earlier", *part.place, tier), f"gradient of {part.label}"
    get = partial(scheduler.registers.get, bucket=part.bucket)
    found = [get((*key, "leaves"), name, leaves, "gradient", tier)] if leaves else []
    if part.reduced > leaves:
        found.append(get((*key, "stays"), name, part.reduced - leaves, "gradient"))
    return tuple(found)


def norm_register(scheduler: Scheduler) -> int:
    return scheduler.registers.get("norm", "norm of the gradients", 0, "temporary")


def wait_gather(scheduler: Scheduler, part: BucketPart, own: Placement | None) -> WaitGather:
    return WaitGather(unsharded_register(scheduler, part, own), bucket=part.bucket, tile=part.tile, tiles=part.tiles)


def free(scheduler: Scheduler, part: BucketPart, own: Placement | None, ends: bool) -> Free:
    unsharded = (unsharded_register(scheduler, part, own),)
    return Free(part.bucket, unsharded, unsharded, False, part.tile, part.tiles, ends)


def wait_fetch(scheduler: Scheduler, register: int) -> WaitFetch:
    return WaitFetch(register)


Tiled = tuple[tuple[BucketPart, ...], ...]
"""The tiles of each of some buckets."""


class Slice(NamedTuple):
    """One slice of a piece on tiles, as every coarse program has it.

    Attributes:
        waits: for the tiles that it reads.
        frees: those of tiles that no later slice reads.
        ready: tiles whose gradient it completes, with the registers of that.
    """

    waits: list[tuple[BucketPart, WaitGather]]
    compute: Compute
    frees: list[Free]
    ready: list[tuple[BucketPart, tuple[int, ...]]]


def slices_of(
    scheduler: Scheduler, full: Compute, region: int, temporary: int, reads: Tiled, makes: Tiled
) -> list[Slice]:  # fmt: skip
    """The slices of a piece of ``region``, which is ``full`` in one, and holds so many bytes of its own.

    Args:
        reads, makes: the tiles of each tiled bucket that it reads, and whose gradient it makes.
    """
    once, slices, found = scheduler.once, max(map(len, (*reads, *makes))), list[Slice]()
    name = f"work of {scheduler.profile.regions[region].phase} {full.module or 'outside of layers'}"
    # What the piece holds is held from the first slice to the last.
    work = (scheduler.registers.get(("work", region, temporary), name, temporary, "temporary"),)
    for i in range(slices):
        waits, frees = list[tuple[BucketPart, WaitGather]](), list[Free]()
        ready = list[tuple[BucketPart, tuple[int, ...]]]()
        read, writes = list[int](), [*full.writes, *work] if i == 0 else []
        for parts in dict.fromkeys((*reads, *makes)):
            tiles = len(parts)
            # A piece runs in as many slices as its finest bucket has tiles: others keep a tile for several slices.
            tile = i * tiles // slices
            begins = i == 0 or tile != (i - 1) * tiles // slices
            ended = i == slices - 1 or tile != (i + 1) * tiles // slices
            part = parts[tile]
            if parts in reads:
                waits.append((part, once(wait_gather, part, None)))
                read.append(unsharded_register(scheduler, part, None))
                frees += [once(free, part, None, False)] if ended else []
            if parts in makes:
                gradient = full_gradient(scheduler, part)
                writes += [gradient] if begins else []
                ready += [(part, (gradient,))] if ended else []
        dead = (*full.dead, *work) if i == slices - 1 else ()
        compute = scheduler.shared.compute(
            full.segment, tuple(writes), dead, full.module, full.source, tuple(read), full.token_tiles
        )
        found.append(Slice(waits, compute, frees, ready))
    return found


def bring_each(
    scheduler: Scheduler,
    parts: tuple[BucketPart, ...],
    placement: Placement,
    own: Placement | None,
    behind: tuple[int, ...],
) -> list[list[Instruction]]:
    """:func:`bring`, for each tile of a bucket."""
    return [bring(scheduler, part, placement, own, behind) for part in parts]


def bring(
    scheduler: Scheduler, part: BucketPart, placement: Placement, own: Placement | None, behind: tuple[int, ...]
) -> list[Instruction]:
    """Fetch the shards of a bucket or tile from their tier into its slice of the whole, and gather it, ``behind`` these
    registers."""
    unsharded = unsharded_register(scheduler, part, own)
    fetched = list[Instruction]()
    if placement.parameters != "device" and part.shards.at(placement).fetched:
        fetched, behind = _shards_up(scheduler, part, placement, behind, unsharded), (unsharded,)
    return [*fetched, Gather(part.bucket, (), behind, unsharded, (), part.sent, part.tile, part.tiles)]


def fetch(scheduler: Scheduler, part: BucketPart, placement: Placement, behind: tuple[int, ...]) -> list[Instruction]:
    """Fetch the shards of a bucket that is gathered later, ``behind`` these registers; a lone rank's are the whole."""
    return _shards_up(scheduler, part, placement, behind, fetched_shards(scheduler, part, placement))


def keep(scheduler: Scheduler, read: Move, up: Move) -> list[Instruction]:
    """The two moves of shards from a disk to the device, of which the host keeps the bytes for an update."""
    return [replace(read, kept=True), replace(up, dead=tuple(r for r in up.dead if r not in read.writes))]


def _shards_up(
    scheduler: Scheduler, part: BucketPart, placement: Placement, behind: tuple[int, ...], into: int
) -> list[Instruction]:
    what, size, (bucket, tile, _) = "shard", part.shards.at(placement).fetched, part.place
    tier = placement.parameters
    return moves_up(scheduler, what, part.label, part.name, size, behind, (), (into,), tier, bucket, tile)


def gather_fetched(scheduler: Scheduler, part: BucketPart, placement: Placement) -> Instruction:
    shards, unsharded = fetched_shards(scheduler, part, placement), unsharded_register(scheduler, part, None)
    return Gather(part.bucket, (), (shards,), unsharded, () if shards == unsharded else (shards,), part.sent)


def fetched_shards(scheduler: Scheduler, part: BucketPart, placement: Placement) -> int:
    """The register of the fetched shards of a bucket."""
    if scheduler.rates.world_size == 1:
        return unsharded_register(scheduler, part, None)
    size = part.shards.at(placement).fetched
    key, name = ("shards", part.bucket, size), f"shards of {part.label}"
    return scheduler.registers.get(key, name, size, "param", bucket=part.bucket)


def activations_up(
    scheduler: Scheduler, what: str, there: tuple[int, ...], own: tuple[int, ...], back: tuple[int, ...], tier: Tier
) -> list[Instruction]:
    """Bring activations back into their registers."""
    size = sum(scheduler.registers.contents[register].bytes for register in back)
    module = layer_of_activation(what) or what
    return moves_up(scheduler, "activations", what, module, size, there, own, back, tier, -1, 0)


def moves_up(
    scheduler: Scheduler, what: str, label: str, module: str, size: int, reads: tuple[int, ...], dead: tuple[int, ...],
    writes: tuple[int, ...], tier: Tier, bucket: int, tile: int,
) -> list[Instruction]:  # fmt: skip
    """Copy ``size`` bytes from ``tier`` into registers on the device."""
    *first, last = hops(tier, "device", scheduler.rates.staging)
    kind: Kind = "activation" if what == "activations" else "param"
    moves = list[Instruction]()
    for hop in first:
        staged = (scheduler.registers.get(("staged", writes), f"{what} of {label}", size, kind, "host"),)
        moves.append(Move(*hop, what, label, module, size, reads, staged, dead, bucket, tile, offload_tier=tier))
        reads = dead = staged
    return [*moves, Move(*last, what, label, module, size, reads, writes, dead, bucket, tile, offload_tier=tier)]


def moves_down(
    scheduler: Scheduler, what: str, label: str, bucket: int, tile: int, here: tuple[int, ...], into: tuple[int, ...],
    tier: Tier, slot: int, there: tuple[int, ...],
) -> list[Instruction]:  # fmt: skip
    """Move registers on the device to ``into`` on ``tier``; of these, those ``there`` hold something that it is added
    to, which a disk is read for."""
    contents = scheduler.registers.contents
    size = sum(contents[register].bytes for register in here)
    module = scheduler.names[bucket] if bucket >= 0 else layer_of_activation(label) or label
    kind, moves = contents[into[0]].kind, list[Instruction]()
    *first, last = hops("device", tier, scheduler.rates.staging)
    for hop in first:
        staged = (scheduler.registers.get(("staged", into), f"{what} of {label}", size, kind, "host"),)
        moves.append(Move(*hop, what, label, module, size, here, staged, here, bucket, tile, slot, offload_tier=tier))
        here = staged
    if there and is_disk(tier):
        # They are added up in the staging buffer, or where the reduced gradient is.
        back = (scheduler.registers.get(("added", into), f"earlier {what} of {label}", 0, kind),)
        moves.append(
            Move(tier, "host", what, label, module, size, here + there, back, (), bucket, tile, offload_tier=tier)
        )
        here += back
    buffer = slot if is_disk(tier) else None
    return [
        *moves,
        Move(*last, what, label, module, size, here + there, into, here, bucket, tile, buffer, offload_tier=tier),
    ]


def reduce(scheduler: Scheduler, part: BucketPart, leaves: bool, grads: tuple[int, ...], again: bool) -> Reduce:
    out = reduced_gradient(scheduler, part, leaves)
    reads = (*grads, out) if again else grads  # it is added to what is there
    return Reduce(part.bucket, (), reads, out, grads, part.summed, part.tile, part.tiles, averaged=part.averaged)


def wait_reduce(scheduler: Scheduler, part: BucketPart, out: int, leaves: bool, last: bool) -> WaitReduce:
    outs: tuple[int, ...] = (norm_register(scheduler),) if last else ()
    if leaves:
        key = ("stays", *part.place)
        # What is not sharded stays on the device.
        size = part.reduced - part.shards.gradient
        outs += (scheduler.registers.get(key, f"gradient of {part.label}", size, "gradient"),)
    return WaitReduce(out, outs, bucket=part.bucket, tile=part.tile, tiles=part.tiles)
