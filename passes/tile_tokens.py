"""Run the head and its loss, and parts of recomputed layers, for some tokens at a time, so that no wide value is whole.

The region of a loss begins at the head's product (:mod:`zerograph.tiling.token_region`). That of a layer is its MLP,
and the norm and residual around it (:mod:`zerograph.tiling.layer_tokens`), or for whole samples all of the layer
(:mod:`zerograph.tiling.layer_batch`). A region is written once for each tile (:mod:`zerograph.tiling.token_tiles`), in
the forward and in the backward, where a tile is computed again right before its gradients: torch may put all that is
computed again first.

Safe because every operator inside treats each token by itself, or sums: numbers per token are those of the whole, as
far as products give the same for fewer rows, and sums are rounded in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import fx

from zerograph.core.plan import Plan
from zerograph.tiling.cuts import Mixes
from zerograph.tiling.layer_batch import batch_region
from zerograph.tiling.layer_tokens import layer_region, wide_products
from zerograph.tiling.region import Region
from zerograph.tiling.token_region import region_of
from zerograph.tiling.token_tiles import write_tiles

log = logging.getLogger(__name__)


def tile_tokens(gm: fx.GraphModule, plan: Plan) -> int:
    """Rewrite ``gm`` (forward, backward or inference graph) in place; returns the number of tiles of all regions."""
    # Of another size, or what Inductor's passes made of it: `recompute` has warned.
    whole = logging.DEBUG, "the head %s and its loss run whole: %s"
    tiles = _write(gm.graph, [plan.head], region_of, plan.loss_tiles, whole)
    what = "the layer of %s runs whole: %s" if plan.by_sample else "the MLP that %s begins runs whole: %s"
    region = batch_region if plan.by_sample else layer_region
    return tiles + _write(gm.graph, plan.token_regions, region, plan.token_tiles, (logging.WARNING, what))


def _write(
    graph: fx.Graph, names: Sequence[str], region_of: Callable[[fx.Node], Region], tiles: int, whole: tuple[int, str]
) -> int:
    """Write the regions that begin at products of these ``names``; returns the number of tiles.

    Args:
        whole: level and text of the message about a product that begins none.
    """
    written, done = 0, set[fx.Node]()
    for product in list(wide_products(graph.nodes, names)):
        if product in done:
            continue
        level, text = whole
        try:
            region = region_of(product)
            done.update(region.nodes)
            level = logging.WARNING  # nobody else tells of a region that cannot be written
            written += write_tiles(graph, region, tiles)
        except Mixes as error:
            log.log(level, text, product.meta["zg"].name, error)
    if written:
        graph.eliminate_dead_code()
    return written
