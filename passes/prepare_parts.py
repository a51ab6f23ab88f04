"""Make ready the layers that run for a part of the batch at a time and save activations.

Their activations are put together sample by sample, and their backward has no product that the forward made. So a
product of the gradient gets the name at which the layer's parts begin, with the number of samples that its rows are of.
Views that lie in memory in another order than their dimensions, as pieces of queries, keys and values do, cannot be put
together: the backward makes them again of what they look at. Safe because it edits metadata only.
"""

from __future__ import annotations

import logging

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from zerograph.core.plan import Plan
from zerograph.core.step import layer_of_activation
from zerograph.graph.nodes import LayerGradient, backward_nodes, is_view
from zerograph.tiling.cuts import PRODUCTS, ROWS, Mixes
from zerograph.tiling.layer_batch import batch_region
from zerograph.tiling.layer_tokens import wide_products
from zerograph.tiling.token_region import NodeRegion, can_be_placed

log = logging.getLogger(__name__)


def prepare_parts(gm: fx.GraphModule, plan: Plan) -> int:
    """Tag nodes of the joint graph ``gm``; returns the number of layers whose backward runs in parts."""
    if not plan.by_sample:
        return 0
    ready, backward = 0, backward_nodes(gm.graph)
    for product in list(wide_products(gm.graph.nodes, plan.token_regions)):
        try:
            forward = batch_region(product, lambda node: node not in backward)
            both = batch_region(product, lambda node, inside=forward.cuts: node in backward or node in inside)  # type: ignore[misc]
        except Mixes as error:
            log.warning("the backward of %s runs whole: %s", product.meta["zg"].name, error)
            continue
        for node in filter(is_view, forward.nodes):
            cut = forward.cuts[node]
            if cut is not None and isinstance(node.meta["val"], torch.Tensor) and not can_be_placed(node, cut):
                _recompute_views(node)
        name = product.meta["zg"].name
        first = _first_product(both, backward)
        if first is not None:
            first.meta["zg"] = LayerGradient(name, both.count)
            ready += 1
        elif _is_saved(name, plan) and not backward.isdisjoint(both.nodes):
            log.warning("the backward of %s runs whole: nothing asks for the gradient of what its products read", name)
    return ready


def _is_saved(name: str, plan: Plan) -> bool:
    return name in plan.save or layer_of_activation(name) not in plan.recompute


def _recompute_views(node: fx.Node) -> None:
    """Have the backward make the view ``node`` again, and all views that it is of."""
    while is_view(node):
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        node = node.args[0]  # type: ignore[assignment]


def _first_product(region: NodeRegion, backward: set[fx.Node]) -> fx.Node | None:
    """The first product of the backward whose rows are samples: the gradient of what a product has read."""
    products = (node for node in region.nodes if node in backward and node.target in PRODUCTS)
    return next((node for node in products if (cut := region.cuts[node]) and cut.dims == ROWS.dims), None)
