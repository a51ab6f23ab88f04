"""Layers by tile over tokens: what their MLPs make, or all that they make, exists for the tokens of a tile at a time.

In a recomputed layer nothing of an MLP waits for the backward, so that it can run for some tokens at a time, forward
and backward, with the norm and the residual around it. For whole samples at a time all of the layer can; what it saves
is put together, and counts whole. Like a loss in tiles (:mod:`~zerograph.planner.profile.loss`) that is a step with
other numbers: schedules, forecasts and checks need not know of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from zerograph.core.plan import Plan
from zerograph.core.step import Op, Step, TokenRegion, layer_of

log = logging.getLogger(__name__)

TOKEN_TILES = (4, 16)
"""Numbers of tiles that are looked at where nothing fits with tokens whole."""


def with_token_tiles(plan: Plan, step: Step, tiles: int, by_sample: bool = False, *, leaves: bool = False) -> Plan:
    """``plan`` with its recomputed layers in ``tiles`` over tokens, or all layers over samples, as far as they can be;
    ``leaves``: shards may leave the device later."""
    found = tuple(region.activation for region in _regions(plan, step, by_sample, leaves)) if tiles > 1 else ()
    return replace(plan, token_tiles=tiles if found else 1, token_regions=found, by_sample=by_sample and bool(found))


def in_token_tiles(plan: Plan, step: Step, tiles: int, by_sample: bool = False) -> Plan:
    """:func:`with_token_tiles`, which the user asked for; warns where no layer can be."""
    found = with_token_tiles(plan, step, tiles, by_sample)
    if by_sample:
        warn_of_whole_layers(step, found, tiles)
    elif tiles > 1 and plan.recompute and not found.token_regions:
        why = (
            "the weights of their MLPs are in tiles, and do not live on the device"
            if regions_of(step, by_sample=False)
            else "none has an MLP of linear layers, each token by itself, of a fixed number of tokens"
        )
        log.warning("token_tiles=%d: layers run for all tokens at once, because %s", tiles, why)
    return found


def warn_of_whole_layers(step: Step, plan: Plan, parts: int) -> None:
    """Say which layers run for the whole batch at once where so many ``parts`` were asked for, and why."""
    regions = regions_of(step, by_sample=True)
    untiled = (region.layer for region in regions if region.activation not in plan.token_regions)
    whole = [*step.whole_batches, *((layer, "its weights are in tiles") for layer in untiled)]
    if parts > 1 and whole:
        log.warning(
            "batch_tiles=%d leaves %d of %d layers whole, %s because %s",
            parts, len(whole), len(step.whole_batches) + len(regions), *whole[0],  # the others are like it, most often
        )  # fmt: skip


def _regions(plan: Plan, step: Step, by_sample: bool, leaves: bool) -> list[TokenRegion]:
    return regions_with(step, by_sample, frozenset(plan.recompute), to_be_whole(plan, by_sample or leaves))


def regions_with(step: Step, by_sample: bool, recomputed: Collection[str], whole: Collection[str]) -> list[TokenRegion]:
    """The regions that can run in tiles where these layers are ``recomputed``, and the parameters ``whole`` are in
    tiles themselves: regions of whole samples can in saved layers, too."""
    fitting = (region for region in regions_of(step, by_sample) if by_sample or region.layer in recomputed)
    return [region for region in fitting if not any(name in whole for name in region.params)]


def to_be_whole(plan: Plan, everywhere: bool) -> frozenset[str]:
    """The parameters whose layers cannot run in tiles of tokens, because they are in tiles themselves: those that leave
    the device, or all ``everywhere``.

    Each tile of tokens gathers and reduces all tiles of a weight, and would move them so often.
    """
    tiled = (bucket for bucket in plan.buckets if bucket.tiles > 1)
    moved = (b for b in tiled if everywhere or not b.placement.parameters == b.placement.spilled == "device")
    return frozenset(param.name for bucket in moved for param in bucket.params)


def regions_of(step: Step, by_sample: bool) -> list[TokenRegion]:
    """The regions of ``step`` that run for some tokens, or for whole samples."""
    return [region for region in step.token_regions if (region.samples is not None) == by_sample]


def tiles_to_try(step: Step) -> Iterator[tuple[int, bool]]:
    """The numbers of tiles that are looked at, and whether they are of whole samples."""
    if regions_of(step, by_sample=False):
        yield from ((tiles, False) for tiles in TOKEN_TILES)
    for samples in sorted({region.samples for region in step.token_regions if region.samples is not None})[:1]:
        yield from ((tiles, True) for tiles in sorted({min(tiles, samples) for tiles in TOKEN_TILES}))


def by_token(step: Step, regions: Collection[TokenRegion], tiles: int) -> Step:
    """``step`` with ``regions`` in ``tiles`` over tokens: of what is inside a tile is held at a time."""
    inside = frozenset(name for region in regions for name in region.values)
    moved = {name: size for region in regions for name, size in region.moved}
    found = in_tiles(step, inside, moved, {name for region in regions for name in region.sums}, tiles)
    # What tracing left no module of may be counted with what is outside of layers, which does not run by tile.
    layers = {region.layer for region in regions}
    ops = (op if layer_of(op.module) in layers else replace(op, token_tiles=1) for op in found.ops)
    pairs = zip(found.values, step.values, strict=True)
    values = (replace(part, whole=value.bytes) if part.bytes != value.bytes else part for part, value in pairs)
    return replace(found, ops=tuple(ops), values=tuple(values))


def in_tiles(step: Step, inside: Collection[str], moved: Mapping[str, int], sums: Collection[str], tiles: int) -> Step:
    """``step`` with the values ``inside`` held a tile at a time.

    Products read and pack their weight, or add to its gradient, once per tile, and what is inside is read from memory
    all the same.

    Args:
        moved: by operation that works on them, bytes that each further tile moves.
        sums: the operations whose bytes are of a sum that they add to.
    """
    sizes = {value.name: value.bytes for value in step.values}

    def counted(op: Op) -> Op:
        own = sum(sizes[name] for name in (*op.reads, *op.writes) if name in inside)
        op = replace(op, token_tiles=tiles) if own else op
        if op.name not in moved:
            return op
        more = (tiles - 1) * moved[op.name]
        packed = op.packed + (0 if op.name in sums else more)
        return replace(op, moved=op.moved + more + own - own // tiles, packed=packed)

    values = tuple(replace(v, bytes=-(-v.bytes // tiles)) if v.name in inside else v for v in step.values)
    return replace(step, ops=tuple(map(counted, step.ops)), values=values)
