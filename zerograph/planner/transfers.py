"""What moving one bucket costs, or one tile of it: bytes of everything that its collectives and copies touch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerograph.core.plan import tile_rows
from zerograph.core.step import Param
from zerograph.planner.placement import Shards
from zerograph.planner.rates import gathered_bytes, reduced_bytes, shard_bytes


@dataclass(frozen=True, slots=True)
class Transfer:
    """A bucket, or a tile of its one parameter: tile *i* is the *i*-th slice of the rows of every rank's shard.

    Attributes:
        name: of the bucket.
        label: of this part, for people: the name, or ``blocks.3 tile 2/4``.
        whole: bytes when gathered.
        summed: bytes of the full gradients as they are summed over ranks.
        reduced: bytes of the shards of all its gradients.
        gradients: bytes of the full gradients that a reduction frees.
        shards: what can leave the device.
    """

    name: str
    label: str
    whole: int
    summed: int
    reduced: int
    gradients: int
    shards: Shards


def transfers(
    name: str, params: Sequence[Param], tiles: int, whole: Mapping[str, int], world: int, moments: int
) -> tuple[Transfer, ...]:
    """The bucket of ``params`` in ``tiles`` parts; ``whole`` are bytes of full gradients by parameter."""
    trainable = [p for p in params if p.trainable]
    gathered, reduced = gathered_bytes(params, world), reduced_bytes(trainable)
    shard = sum(shard_bytes(p, world) for p in trainable)
    gradients = sum(whole.get(p.name, 0) for p in trainable)
    moved = Shards.of(params, world, moments)
    rows = params[0].chunk_rows(world) if tiles > 1 else 1
    slices = tile_rows(rows, tiles)

    def part(size: int, tile: int) -> int:
        """Bytes of ``size`` in the rows of a tile; parts of what is not padded add up all the same."""
        begin, end = slices[tile]
        return size * end // rows - size * begin // rows

    return tuple(
        Transfer(
            name=name,
            label=name if tiles == 1 else f"{name} tile {tile + 1}/{tiles}",
            whole=part(gathered, tile),
            summed=part(reduced, tile),
            reduced=part(shard, tile),
            gradients=part(gradients, tile),
            shards=Shards(*(part(size, tile) for size in (moved.copy, moved.frozen, moved.gradient, moved.optimizer))),
        )
        for tile in range(tiles)
    )
