"""Instructions and registers of one bucket or tile, and of saved activations, in coarse programs. Each is made once for
a scheduler, from what tells it apart."""

from __future__ import annotations

from functools import partial

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
from zerograph.planner.programs.schedule import Piece, Scheduler


def unsharded_register(scheduler: Scheduler, bucket: int, tile: int, tiles: int, own: Placement | None) -> int:
    """The register of a gathered bucket or tile; where it has its ``own`` placement, this rank's slice is held
    anyway."""
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    size = part.unsharded
    if own is not None:
        placed = part.shards.at(own)
        size -= placed.in_place if scheduler.rates.world_size == 1 else placed.copies
    return scheduler.registers.get(("unsharded", bucket, tile, tiles, own), part.label, size, "gathered", bucket=bucket)


def full_gradient(scheduler: Scheduler, bucket: int, tile: int, tiles: int) -> int:
    """The register of the full gradient of a tile."""
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    name = f"full gradient of {part.label}"
    return scheduler.registers.get(("tile", bucket, tile, tiles), name, part.gradients, "gradient", bucket=bucket)


def reduced_gradient(scheduler: Scheduler, bucket: int, tile: int, tiles: int, leaves: bool) -> int:
    """The register of this rank's shards of reduced gradients; of some that ``leaves``, those that leave the device."""
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    size = part.shards.gradient if leaves else part.reduced
    key = ("reduced", bucket, tile, tiles, leaves)
    return scheduler.registers.get(key, f"gradient of {part.label}", size, "gradient", bucket=bucket)


def offloaded_gradient(scheduler: Scheduler, bucket: int, tile: int, tiles: int, tier: Tier) -> int:
    """The register of reduced gradients that have left the device for ``tier``."""
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    key, name = ("into", bucket, tile, tiles, tier), f"gradient of {part.label}"
    return scheduler.registers.get(key, name, part.shards.gradient, "gradient", tier, bucket=bucket)


def earlier_gradients(scheduler: Scheduler, bucket: int, tile: int, tiles: int, tier: Tier) -> tuple[int, ...]:
    """The registers of reduced gradients of the step before, beside those that this step makes: on ``tier`` those that
    leave for it, and on the device the others."""
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    leaves = part.shards.gradient if tier != "device" else 0
    key, name = ("earlier", bucket, tile, tiles, tier), f"gradient of {part.label}"
    get = partial(scheduler.registers.get, bucket=bucket)
    found = [get((*key, "leaves"), name, leaves, "gradient", tier)] if leaves else []
    if part.reduced > leaves:
        found.append(get((*key, "stays"), name, part.reduced - leaves, "gradient"))
    return tuple(found)


def norm_register(scheduler: Scheduler) -> int:
    return scheduler.registers.get("norm", "norm of the gradients", 0, "temporary")


def wait_gather(scheduler: Scheduler, bucket: int, tile: int, tiles: int, own: Placement | None) -> WaitGather:
    return WaitGather(unsharded_register(scheduler, bucket, tile, tiles, own), bucket=bucket, tile=tile, tiles=tiles)


def free(scheduler: Scheduler, bucket: int, tile: int, tiles: int, own: Placement | None, ends: bool) -> Free:
    unsharded = (unsharded_register(scheduler, bucket, tile, tiles, own),)
    return Free(bucket, unsharded, unsharded, False, tile, tiles, ends)


def wait_fetch(scheduler: Scheduler, register: int) -> WaitFetch:
    return WaitFetch(register)


def slice_of(
    scheduler: Scheduler, piece: Piece, full: Compute, number: int, read: tuple[int, ...], makes: tuple[int, ...]
) -> Compute:
    """One slice of a piece, which holds what the piece holds from the first to the last of them."""
    name = f"work of {scheduler.profile.regions[piece.region].phase} {piece.compute.module or 'outside of layers'}"
    key = ("work", piece.region, piece.temporary)
    work = (scheduler.registers.get(key, name, piece.temporary, "temporary"),)
    outs = (*full.outs, *work, *makes) if number == 0 else makes
    dead = (*full.dead, *work) if number == piece.slices - 1 else ()
    return scheduler.compute(full.segment, outs, dead, full.module, full.source, read, full.token_tiles)


def bring(
    scheduler: Scheduler, bucket: int, tile: int, tiles: int, placement: Placement, own: Placement | None,
    behind: tuple[int, ...],
) -> list[Instruction]:  # fmt: skip
    """Fetch the shards of a bucket or tile from their tier into its slice of the whole, and gather it, ``behind`` these
    registers."""
    part, name = scheduler.bucket_parts(bucket, tiles)[tile], scheduler.names[bucket]
    unsharded = unsharded_register(scheduler, bucket, tile, tiles, own)
    tier = placement.parameters
    size = part.shards.at(placement).fetched if tier != "device" else 0
    if not size:
        return [Gather(bucket, (), behind, unsharded, (), part.sent, tile, tiles)]
    fetched = moves_up(scheduler, "shard", part.label, name, size, behind, (), (unsharded,), tier, bucket, tile)
    return [*fetched, Gather(bucket, (), (unsharded,), unsharded, (), part.sent, tile, tiles)]


def fetch(scheduler: Scheduler, bucket: int, placement: Placement, behind: tuple[int, ...]) -> list[Instruction]:
    """Fetch the shards of a bucket that is gathered later, ``behind`` these registers; a lone rank's are the whole."""
    part, name = scheduler.bucket_parts(bucket, 1)[0], scheduler.names[bucket]
    size, shards = part.shards.at(placement).fetched, (fetched_shards(scheduler, bucket, placement),)
    return moves_up(scheduler, "shard", part.label, name, size, behind, (), shards, placement.parameters, bucket, 0)


def gather_fetched(scheduler: Scheduler, bucket: int, placement: Placement) -> Instruction:
    part, shards, unsharded = (
        scheduler.bucket_parts(bucket, 1)[0],
        fetched_shards(scheduler, bucket, placement),
        unsharded_register(scheduler, bucket, 0, 1, None),
    )
    return Gather(bucket, (), (shards,), unsharded, () if shards == unsharded else (shards,), part.sent)


def fetched_shards(scheduler: Scheduler, bucket: int, placement: Placement) -> int:
    """The register of the fetched shards of a bucket."""
    if scheduler.rates.world_size == 1:
        return unsharded_register(scheduler, bucket, 0, 1, None)
    part = scheduler.bucket_parts(bucket, 1)[0]
    size = part.shards.at(placement).fetched
    return scheduler.registers.get(("shards", bucket, size), f"shards of {part.label}", size, "param", bucket=bucket)


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


def reduce(
    scheduler: Scheduler, bucket: int, tile: int, tiles: int, leaves: bool, grads: tuple[int, ...], again: bool
) -> Reduce:
    part = scheduler.bucket_parts(bucket, tiles)[tile]
    out = reduced_gradient(scheduler, bucket, tile, tiles, leaves)
    reads = (*grads, out) if again else grads  # it is added to what is there
    return Reduce(bucket, (), reads, out, grads, part.summed, tile, tiles, averaged=part.averaged)


def wait_reduce(scheduler: Scheduler, reduce: Reduce, leaves: bool, last: bool) -> WaitReduce:
    outs: tuple[int, ...] = (norm_register(scheduler),) if last else ()
    if leaves:
        part = scheduler.bucket_parts(reduce.bucket, reduce.tiles)[reduce.tile]
        key = ("stays", reduce.bucket, reduce.tile, reduce.tiles)
        # What is not sharded stays on the device.
        size = part.reduced - part.shards.gradient
        outs += (scheduler.registers.get(key, f"gradient of {part.label}", size, "gradient"),)
    return WaitReduce(reduce.out, outs, bucket=reduce.bucket, tile=reduce.tile, tiles=reduce.tiles)
