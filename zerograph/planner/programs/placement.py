"""Bytes of one bucket, or of one tile of it: what lies on which tier between steps, and what a step moves.

:mod:`zerograph.core.placement` says where. Scalars and parameters of fewer rows than ranks are not sharded, so they
stay on the device wherever their bucket goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from zerograph.core.files.planfile import Holding
from zerograph.core.instructions import Update
from zerograph.core.machine import OFFLOAD_TIERS, Tier, is_disk
from zerograph.core.param_bytes import (
    Plain,
    averaged_bytes,
    copy_bytes,
    gathered_bytes,
    reduced_bytes,
    sent_bytes,
    shard_bytes,
    update_bytes,
)
from zerograph.core.placement import copy_tier, second_copies, values_tier
from zerograph.core.plan import Placement, Plan, tile_label, tile_rows
from zerograph.core.slots import SLOTS, slot_bytes
from zerograph.core.step import Kind, Param
from zerograph.sim.costs import TierBytes
from zerograph.sim.rates import Rates

STATES_OFFLOADED = Placement(gradients=OFFLOAD_TIERS[-1], optimizer=OFFLOAD_TIERS[-1])
"""Where all that can be updated off the device is, and what is gathered is on it."""


class Alike(NamedTuple):
    """Parameters that :mod:`zerograph.core.placement` puts in one place: bytes of their shards, and of these in the
    compute dtype, which for ``cast`` ones is another."""

    trainable: bool
    is_master: bool
    cast: bool
    values: int
    copy: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Bytes of the shards of one bucket where these are placed.

    Attributes:
        masters: values of trained parameters beside which there is a copy.
        copies: in the compute dtype, of those.
        shared: values of the other trained ones, which are gathered themselves.
        frozen: values that are not trained.
        fetched: what comes to the device before a gather, when the parameters live elsewhere.
        in_place: of what is gathered, what one rank need not cast where parameters live on the device.
        left: values that are off the device.
        optimizer: masters and moments.
        traffic: that an update on the host reads and writes: gradient, states and parameters twice, the new copy.
        parameters: copies, and values that left without one.
    """

    masters: int
    copies: int
    shared: int
    frozen: int
    fetched: int
    in_place: int
    left: int
    optimizer: int
    traffic: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Shards:
    """Bytes of what of one bucket can leave the device, on one rank.

    Attributes:
        alike: its sharded parameters.
        gradient: shards of their reduced gradients.
        moments: that the optimizer keeps of them.
        split: whether the host has another memory than the device.
    """

    alike: tuple[Alike, ...]
    gradient: int
    moments: int
    split: bool

    @classmethod
    def of(cls, params: Sequence[Param], moments: int, staging: Tier) -> Shards:
        """The shards of the sharded ones of ``params``; buffers of disks are on ``staging``."""
        found: dict[tuple[bool, bool, bool], tuple[int, int]] = {}
        for p in params:
            if p.sharded:
                values, copy = found.get(key := (p.trainable, p.is_master, p.dtype != p.compute_dtype), (0, 0))
                found[key] = values + shard_bytes(p), copy + copy_bytes(p)
        alike = tuple(Alike(*key, *sizes) for key, sizes in found.items())
        gradient = sum(some.values for some in alike if some.trainable)
        return cls(alike, gradient, gradient * moments, staging != "device")

    def cut(self, part: Callable[[int], int]) -> Shards:
        """A part of all that there is."""
        alike = tuple(some._replace(values=part(some.values), copy=part(some.copy)) for some in self.alike)
        return replace(self, alike=alike, gradient=part(self.gradient), moments=part(self.moments))

    def at(self, placement: Placement) -> Placed:
        """The bytes of each kind where it lives at ``placement``."""
        masters = copies = shared = frozen = frozen_copies = fetched = in_place = left = 0
        for some in self.alike:
            left += some.values * (values_tier(some, placement, self.split) != "device")
            copied = copy_tier(some, placement, self.split) is not None
            fetched += some.copy if copied else some.values
            in_place += some.copy * (copied or not some.cast)
            if not some.trainable:
                frozen += some.values
                frozen_copies += some.copy * copied
            elif copied:
                masters += some.values
                copies += some.copy
            else:
                shared += some.values
        optimizer = masters + self.moments
        traffic = self.gradient + 2 * (optimizer + shared) + copies
        parameters = copies + frozen_copies + left - masters
        return Placed(masters, copies, shared, frozen, fetched, in_place, left, optimizer, traffic, parameters)

    def moved(self, placement: Placement) -> TierBytes:
        """The bytes that ``placement`` adds to each tier between steps, and takes off the device (below zero)."""
        if placement.optimizer == "device":
            return ()
        own = self.at(placement)
        left = own.left + self.moments
        return ("device", -left), (placement.optimizer, own.optimizer), (placement.parameters, own.parameters)


@dataclass(frozen=True, slots=True, eq=False)  # each is made once, and instructions are found by it
class BucketPart:
    """A bucket, or a tile of its one parameter: tile *i* is the *i*-th slice of the rows of every rank's shard.

    Attributes:
        bucket, tile, tiles: which of how many tiles of which bucket it is.
        name: of the bucket.
        label: of this part, for people: the name, or ``blocks.3 tile 2/4``.
        unsharded: bytes when gathered.
        sent: bytes that all ranks send in its gather.
        summed: bytes of the full gradients as they are summed over ranks.
        averaged: bytes of a rank's part of them as an average over replicas sends it.
        reduced: bytes of the shards of all its gradients.
        gradients: bytes of the full gradients that a reduction frees.
        shards: what can leave the device.
        updated: parameters whose states can.
    """

    bucket: int
    tile: int
    tiles: int
    name: str
    label: str
    unsharded: int
    sent: int
    summed: int
    averaged: int
    reduced: int
    gradients: int
    shards: Shards
    updated: int

    @property
    def place(self) -> tuple[int, int, int]:
        """What tells its registers apart."""
        return self.bucket, self.tile, self.tiles


def bucket_parts(
    bucket: int, name: str, params: Sequence[Param], tiles: int, full: Mapping[str, int], rates: Rates, moments: int
) -> tuple[BucketPart, ...]:
    """The bucket of ``params`` in ``tiles`` parts; ``full`` are bytes of full gradients by parameter."""
    trainable = [p for p in params if p.trainable]
    gathered, sent, reduced = gathered_bytes(params), sent_bytes(params), reduced_bytes(trainable)
    shard, averaged = sum(shard_bytes(p) for p in trainable), averaged_bytes(trainable)
    gradients = sum(full.get(p.name, 0) for p in trainable)
    shards = Shards.of(params, moments, rates.staging)
    # Columns may be in more tiles than there are rows; of either a tile has its share of the bytes.
    rows = max(params[0].chunk, tiles) if tiles > 1 else 1
    slices = tile_rows(rows, tiles)

    def part(size: int, tile: int) -> int:
        """Bytes of ``size`` in the rows of a tile; parts of what is not padded add up all the same."""
        begin, end = slices[tile]
        # As a difference of two shares, so that tiles add up to the whole to the byte.
        return size * end // rows - size * begin // rows

    return tuple(
        BucketPart(
            bucket=bucket,
            tile=tile,
            tiles=tiles,
            name=name,
            label=tile_label(name, tile, tiles),
            unsharded=part(gathered, tile),
            sent=part(sent, tile),
            summed=part(reduced, tile),
            averaged=part(averaged, tile),
            reduced=part(shard, tile),
            gradients=part(gradients, tile),
            shards=shards.cut(partial(part, tile=tile)),
            updated=sum(p.sharded for p in trainable),
        )
        for tile in range(tiles)
    )


def bytes_on(tier: Tier, plan: Plan, moments: int, staging: Tier) -> dict[str, int]:
    """Bytes that a rank keeps on ``tier``, which is not the device, under ``plan``, by what they are for."""
    found = dict.fromkeys(("parameters", "gradients", "optimizer states"), 0)
    for bucket in plan.buckets:
        placement = bucket.placement
        shards = Shards.of(bucket.params, moments, staging)
        placed = shards.at(placement)
        found["parameters"] += placed.parameters * (placement.parameters == tier)
        found["parameters"] += placed.copies * (tier == "host" and second_copies(plan, bucket))
        found["gradients"] += shards.gradient * (placement.spilled == tier)
        found["optimizer states"] += placed.optimizer * (placement.optimizer == tier)
    return found


def streamed(params: Sequence[Param]) -> int:
    """Elements of this rank that an update of ``params`` streams where their states are on a disk."""
    return sum(p.chunk_elements for p in params if p.sharded and p.trainable)


def ring_bytes(buckets: Iterable[tuple[Placement, int]], staging: Tier) -> int:
    """Bytes of the slots that pass what a disk has of some buckets, given their placements and what :func:`streamed`
    counts.

    On a CPU only: plans that stage on the host have a buffer for each bucket or tile.
    """
    offloaded = (
        (elements for placement, elements in buckets if is_disk(placement.optimizer)) if staging == "device" else ()
    )
    return SLOTS * slot_bytes(max(offloaded, default=0))


def between_steps(plan: Plan, state_sizes: Mapping[str, int], staging: Tier) -> Iterator[Holding]:
    """The holdings on each tier between steps, bucket by bucket; gradients come with the backward.

    ``state_sizes`` are bytes of optimizer states by parameter (:func:`~zerograph.core.param_bytes.sizes_of_states`).
    """
    for bucket in plan.buckets:
        placement = bucket.placement
        placed = Shards.of(bucket.params, 0, staging).at(placement)
        sharded = sum(shard_bytes(p) for p in bucket.params)
        states = sum(state_sizes.get(p.name, 0) for p in bucket.params)
        offloaded = sum(state_sizes.get(p.name, 0) for p in bucket.params if p.sharded)
        found: list[tuple[str, Kind, Tier, int]]
        if placement.optimizer == "device":
            found = [("shards", "param", "device", sharded), ("states", "state", "device", states)]
        else:
            found = [
                ("shards", "param", "device", sharded - placed.left),
                ("states", "state", "device", states - offloaded),
                ("shards in the compute dtype", "param", placement.parameters, placed.parameters),
                ("master copy and states", "state", placement.optimizer, placed.masters + offloaded),
            ]
        if second_copies(plan, bucket):
            found.append(("second copy", "param", "host", placed.copies))
        for what, kind, tier, size in found:
            if size:
                yield Holding(f"{what} of {bucket.name}", kind, tier, size, -1, -1, bucket.name)
    ring = ring_bytes(((b.placement, streamed(b.params)) for b in plan.buckets), staging)
    if ring:
        yield Holding("slots that states pass through", "temporary", staging, ring, -1, -1)


def plain_between_steps(params: Sequence[Plain], moments: int, *, adds: bool) -> Iterator[Holding]:
    """What one rank keeps of its own ``params``, which are in no bucket; with ``adds`` their gradients of earlier
    micro-batches, too."""
    trained = sum(p.bytes for p in params if p.trained)
    found: list[tuple[str, Kind, int]] = [
        ("all parameters", "param", sum(p.bytes for p in params)),
        ("states of all parameters", "state", trained * moments),
        ("gradients of all parameters", "gradient", trained * adds),
    ]
    for what, kind, size in found:
        if size:
            yield Holding(what, kind, "device", size, -1, -1)


def device_update(buckets: Sequence[Sequence[Param]], host: Collection[int], state_sizes: Mapping[str, int]) -> Update:
    """The update on the device of the parameters in ``state_sizes`` (:func:`sizes_of_states`): those of all
    ``buckets``, of the buckets in ``host`` what is not sharded.

    It is one pass over parameters, gradients and states; the gradients go afterwards (``zero_grad``).
    """
    here: dict[int, list[int]] = {}
    for index, params in enumerate(buckets):
        for param in params:
            if param.name in state_sizes and not (param.sharded and index in host):
                here.setdefault(index, []).append(update_bytes(param, state_sizes[param.name]))
    return Update(tuple(here), tuple(size for sizes in here.values() for size in sizes))
