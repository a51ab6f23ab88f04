"""Layers by tile over tokens: what their MLPs make exists for the tokens of a tile at a time.

In a recomputed layer nothing of an MLP waits for the backward, so that it can run for some tokens at a time, forward
and backward, with the norm and the residual around it. Like a loss in tiles (:mod:`~zerograph.planner.profile.loss`)
that is a step with other numbers: schedules, forecasts and checks need not know of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from zerograph.core.plan import Plan
from zerograph.core.step import Op, Step, TokenRegion, layer_of

log = logging.getLogger(__name__)

TOKEN_TILES = (4, 16)
"""Numbers of tiles that are looked at where nothing fits with tokens whole."""


def with_token_tiles(plan: Plan, step: Step, tiles: int) -> Plan:
    """``plan`` with its recomputed layers in ``tiles`` over tokens, as far as they can be and their weights are untiled
    while they are used."""
    found = tuple(region.activation for region in _regions(plan, step)) if tiles > 1 else ()
    return replace(plan, token_tiles=tiles if found else 1, token_regions=found)


def in_token_tiles(plan: Plan, step: Step, tiles: int) -> Plan:
    """:func:`with_token_tiles`, which the user asked for; warns where no layer can be."""
    found = with_token_tiles(plan, step, tiles)
    if tiles > 1 and plan.recompute and not found.token_regions:
        why = (
            "the weights of their MLPs are in tiles"
            if step.token_regions
            else "none has an MLP of linear layers, each token by itself, of a fixed number of tokens"
        )
        log.warning("token_tiles=%d: layers run for all tokens at once, because %s", tiles, why)
    return found


def _regions(plan: Plan, step: Step) -> list[TokenRegion]:
    layers = frozenset(plan.recompute)
    tiled = {param.name for bucket in plan.buckets if bucket.tiles > 1 for param in bucket.params}
    return [region for region in step.token_regions if region.layer in layers and tiled.isdisjoint(region.params)]


def by_token(step: Step, regions: Collection[TokenRegion], tiles: int) -> Step:
    """``step`` with ``regions`` in ``tiles`` over tokens: of what is inside a tile is held at a time."""
    inside = frozenset(name for region in regions for name in region.values)
    moved = {name: size for region in regions for name, size in region.moved}
    found = in_tiles(step, inside, moved, {name for region in regions for name in region.sums}, tiles)
    # What tracing left no module of may be counted with what is outside of layers, which does not run by tile.
    layers = {region.layer for region in regions}
    ops = (op if layer_of(op.module) in layers else replace(op, token_tiles=1) for op in found.ops)
    return replace(found, ops=tuple(ops))


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
        if op.phase == "update":
            return op
        op = replace(op, token_tiles=tiles) if own else op
        if op.name not in moved:
            return op
        more = (tiles - 1) * moved[op.name]
        packed = op.packed + (0 if op.name in sums else more)
        return replace(op, moved=op.moved + more + own - own // tiles, packed=packed)

    values = tuple(replace(v, bytes=-(-v.bytes // tiles)) if v.name in inside else v for v in step.values)
    return replace(step, ops=tuple(map(counted, step.ops)), values=values)
