"""Run the head and its loss for some tokens at a time, so that logits never exist whole.

The region that begins at the head's product (:mod:`zerograph.tiling.token_region`) is written once for each tile, one
after another (:mod:`zerograph.tiling.token_tiles`).

Safe because every operator inside treats each token by itself, or sums: numbers per token are those of the whole, as
far as products give the same for fewer rows, and sums are rounded in another order. The backward computes the logits of
each tile again, as ``recompute`` says.
"""

from __future__ import annotations

import logging

from torch import fx

from zerograph.core.plan import Plan
from zerograph.tiling.cuts import Mixes
from zerograph.tiling.token_region import head_of, region_of
from zerograph.tiling.token_tiles import write_tiles

log = logging.getLogger(__name__)


def tile_loss(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of tiles."""
    head = head_of(gm.graph.nodes, plan) if plan.loss_tiles > 1 else None
    if head is None:
        return 0
    try:
        region = region_of(head)
    except Mixes as error:
        # Of another size, or what Inductor's passes made of it: `recompute` has warned.
        log.debug("logits stay whole: %s", error)
        return 0
    tiles = write_tiles(gm.graph, region, plan.loss_tiles)
    gm.graph.eliminate_dead_code()
    return tiles
