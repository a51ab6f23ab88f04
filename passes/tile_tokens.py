"""Run the MLP of recomputed layers, and the norm and residual around it, or all of a layer, for some tokens at a time.

The region of each layer (:mod:`zerograph.tiling.layer_tokens`, or for whole samples
:mod:`zerograph.tiling.layer_batch`) is written once for each tile
(:mod:`zerograph.tiling.token_tiles`), in the forward and in the backward, where a tile is computed again right before
its gradients: torch may put all that is computed again first.

Safe because every operator inside treats each token by itself, or sums: numbers per token are those of the whole, as
far as products give the same for fewer rows, and sums are rounded in another order.
"""

from __future__ import annotations

import logging

from torch import fx

from zerograph.core.plan import Plan
from zerograph.tiling.cuts import Mixes
from zerograph.tiling.layer_batch import batch_region
from zerograph.tiling.layer_tokens import layer_region, wide_products
from zerograph.tiling.token_tiles import write_tiles

log = logging.getLogger(__name__)


def tile_tokens(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward or backward graph) in place; returns the number of tiles of all layers."""
    if plan.token_tiles == 1:
        return 0
    tiles, done = 0, set[fx.Node]()
    for product in list(wide_products(gm.graph.nodes, plan.token_regions)):
        if product in done:
            continue
        try:
            region = batch_region(product) if plan.by_sample else layer_region(product)
            done.update(region.nodes)
            tiles += write_tiles(gm.graph, region, plan.token_tiles)
        except Mixes as error:
            what = "the layer of %s runs whole: %s" if plan.by_sample else "the MLP that %s begins runs whole: %s"
            log.warning(what, product.meta["zg"].name, error)
    if tiles:
        gm.graph.eliminate_dead_code()
    return tiles
