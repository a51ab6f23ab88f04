"""Bytes of one bucket, or of one tile of it: what lies on which tier between steps, and what a step moves.

As in ZeRO-Offload, the master copy lives with the optimizer. On the device it is the shard that is gathered; off it,
parameters are a copy in the compute dtype beside it. One that computes in its own dtype needs no copy where parameters
live with the optimizer, or where the host's memory is the device's, as on a CPU: it is updated where parameters live.
Scalars and parameters of fewer rows than ranks are not sharded, so they stay on the device wherever their bucket goes,
and so do shards that are not trained unless the parameters leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from zerograph.core.machine import Tier
from zerograph.core.param_bytes import copy_bytes, gathered_bytes, is_whole, reduced_bytes, shard_bytes
from zerograph.core.plan import Homes, Plan, tile_rows
from zerograph.core.planfile import Holding
from zerograph.core.simulate import Memory
from zerograph.core.slots import SLOTS, slot_bytes
from zerograph.core.step import Kind, Param
from zerograph.planner.rates import Rates


@dataclass(frozen=True, slots=True)
class Shards:
    """Bytes of what of one bucket can leave the device, on one rank.

    Attributes:
        copy: shards of trainable parameters in the compute dtype, of those that are copied.
        alike: those of them that need no copy beside their masters.
        beside: bytes of these masters.
        shared: shards of the others, which are gathered themselves.
        frozen: shards of parameters that are not trained.
        gradient: of their reduced gradients.
        optimizer: master copies and moments.
    """

    copy: int
    alike: int
    beside: int
    shared: int
    frozen: int
    gradient: int
    optimizer: int

    @classmethod
    def of(cls, params: Sequence[Param], world_size: int, moments: int, staging: Tier) -> Shards:
        """Of the sharded ones of ``params``; buffers of NVMe are on ``staging``."""
        trained = [p for p in params if p.sharded and p.trainable]
        copied = [p for p in trained if staging != "device" or p.is_master]
        shards, masters = (sum(shard_bytes(p, world_size) for p in some) for some in (trained, copied))
        return cls(
            copy=sum(copy_bytes(p, world_size) for p in copied),
            alike=sum(copy_bytes(p, world_size) for p in copied if not p.is_master),
            beside=sum(shard_bytes(p, world_size) for p in copied if not p.is_master),
            shared=shards - masters,
            frozen=sum(shard_bytes(p, world_size) for p in params if p.sharded and not p.trainable),
            gradient=shards,
            optimizer=masters + shards * moments,
        )

    def at(self, homes: Homes) -> Shards:
        """What of these is copied where parameters live at ``homes``."""
        if homes.parameters != homes.optimizer:
            return self
        return replace(
            self,
            copy=self.copy - self.alike,
            alike=0,
            beside=0,
            shared=self.shared + self.beside,
            optimizer=self.optimizer - self.beside,
        )

    @property
    def fetched(self) -> int:
        """Bytes that come to the device before a gather, when the parameters live elsewhere."""
        return self.copy + self.shared + self.frozen

    @property
    def traffic(self) -> int:
        """Bytes that an update on the host reads and writes: gradient, states and parameters twice, the new copy."""
        return self.gradient + 2 * (self.optimizer + self.shared) + self.copy

    def moved(self, homes: Homes) -> Memory:
        """What ``homes`` add to each tier between steps, and take off the device (below zero)."""
        if homes.optimizer == "device":
            return ()
        own = self.at(homes)
        found: list[tuple[Tier, int]] = [
            ("device", -own.optimizer),
            (homes.optimizer, own.optimizer),
            (homes.parameters, own.copy),
        ]
        if homes.parameters != "device":
            found += [("device", -own.frozen - own.shared), (homes.parameters, own.frozen + own.shared)]
        return tuple(found)


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A bucket, or a tile of its one parameter: tile *i* is the *i*-th slice of the rows of every rank's shard.

    Attributes:
        name: of the bucket.
        label: of this part, for people: the name, or ``blocks.3 tile 2/4``.
        whole: bytes when gathered.
        summed: bytes of the full gradients as they are summed over ranks.
        reduced: bytes of the shards of all its gradients.
        gradients: bytes of the full gradients that a reduction frees.
        own: bytes of the whole that shards on the device, or copies of these, are where it is gathered in place.
        shards: what can leave the device.
        updated: parameters whose states can.
    """

    name: str
    label: str
    whole: int
    summed: int
    reduced: int
    gradients: int
    own: int
    shards: Shards
    updated: int


def bucket_parts(
    name: str, params: Sequence[Param], tiles: int, whole: Mapping[str, int], rates: Rates, moments: int
) -> tuple[BucketPart, ...]:
    """The bucket of ``params`` in ``tiles`` parts; ``whole`` are bytes of full gradients by parameter."""
    world = rates.world_size
    trainable = [p for p in params if p.trainable]
    gathered, reduced = gathered_bytes(params, world), reduced_bytes(trainable)
    shard = sum(shard_bytes(p, world) for p in trainable)
    gradients = sum(whole.get(p.name, 0) for p in trainable)
    moved = Shards.of(params, world, moments, rates.staging)
    # A gather of CPU ranks is not in place.
    own = moved.copy if world > 1 and rates.overlaps else 0
    if world == 1:
        own = sum(copy_bytes(p, world) for p in params if p.sharded and is_whole(p, world))
    # Columns may be in more tiles than there are rows; of either a tile has its share of the bytes.
    rows = max(params[0].chunk(world), tiles) if tiles > 1 else 1
    slices = tile_rows(rows, tiles)

    def part(size: int, tile: int) -> int:
        """Bytes of ``size`` in the rows of a tile; parts of what is not padded add up all the same."""
        begin, end = slices[tile]
        # As a difference of two shares, so that tiles add up to the whole to the byte.
        return size * end // rows - size * begin // rows

    return tuple(
        BucketPart(
            name=name,
            label=name if tiles == 1 else f"{name} tile {tile + 1}/{tiles}",
            whole=part(gathered, tile),
            summed=part(reduced, tile),
            reduced=part(shard, tile),
            gradients=part(gradients, tile),
            own=part(own, tile),
            shards=Shards(*(part(size, tile) for size in astuple(moved))),
            updated=sum(p.sharded for p in trainable),
        )
        for tile in range(tiles)
    )


def kept_on(tier: Tier, plan: Plan, moments: int, staging: Tier) -> dict[str, int]:
    """Bytes that a rank keeps on ``tier``, which is not the device, under ``plan``, by what they are for."""
    found = dict.fromkeys(("parameters", "gradients", "optimizer states"), 0)
    for bucket in plan.buckets:
        homes = bucket.homes
        shards = Shards.of(bucket.params, plan.world_size, moments, staging).at(homes)
        found["parameters"] += shards.fetched * (homes.parameters == tier)
        found["gradients"] += shards.gradient * (homes.spilled == tier)
        found["optimizer states"] += shards.optimizer * (homes.optimizer == tier)
    return found


def streamed(params: Sequence[Param], world_size: int) -> int:
    """Elements of this rank that an update of ``params`` streams where their states are on NVMe."""
    return sum(p.chunk_elements(world_size) for p in params if p.sharded and p.trainable)


def ring_bytes(buckets: Iterable[tuple[Homes, int]], staging: Tier) -> int:
    """Bytes of the slots that pass what NVMe has of some buckets, given their homes and what :func:`streamed` counts.

    On a CPU only: plans that stage on the host have a buffer for each bucket or tile.
    """
    away = (elements for homes, elements in buckets if homes.optimizer == "nvme") if staging == "device" else ()
    return SLOTS * slot_bytes(max(away, default=0))


def between_steps(plan: Plan, kept: Mapping[str, int], staging: Tier) -> Iterator[Holding]:
    """What lies on each tier between steps, bucket by bucket; gradients come with the backward.

    ``kept`` are bytes of optimizer states by parameter (:func:`~zerograph.core.param_bytes.kept_states`).
    """
    for bucket in plan.buckets:
        homes = bucket.homes
        shards = Shards.of(bucket.params, plan.world_size, 0, staging).at(homes)
        whole = sum(shard_bytes(p, plan.world_size) for p in bucket.params)
        states = sum(kept.get(p.name, 0) for p in bucket.params)
        away = sum(kept.get(p.name, 0) for p in bucket.params if p.sharded)
        found: list[tuple[str, Kind, Tier, int]]
        if homes.optimizer == "device":
            found = [("shards", "param", "device", whole), ("states", "state", "device", states)]
        else:
            follow = shards.frozen + shards.shared if homes.parameters != "device" else 0
            stays = whole - shards.optimizer - follow  # without moments, `optimizer` are the masters
            found = [
                ("shards", "param", "device", stays),
                ("states", "state", "device", states - away),
                ("shards in the compute dtype", "param", homes.parameters, shards.copy + follow),
                ("master copy and states", "state", homes.optimizer, shards.optimizer + away),
            ]
        for what, kind, tier, size in found:
            if size:
                yield Holding(f"{what} of {bucket.name}", kind, tier, size, -1, -1, bucket.name)
    ring = ring_bytes(((b.homes, streamed(b.params, plan.world_size)) for b in plan.buckets), staging)
    if ring:
        yield Holding("slots that states pass through", "temporary", staging, ring, -1, -1)
