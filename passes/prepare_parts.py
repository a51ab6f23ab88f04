"""Make ready the layers that run for a part of the batch at a time and save activations.

These are put together sample by sample, and the backward of a saved layer has no product that the forward made. So
products of gradients get the name at which the layer's parts begin, with the number of samples that their rows are of:
all of them, as the halves of a layer on both sides of a residual may have nothing in common but a sum of autograd's,
which is of no layer. Views that lie in memory in another order than their dimensions, as pieces of queries, keys and
values do, cannot be put together: the backward makes them again of what they look at, and the forward saves that. Safe
because it edits metadata only.
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
from zerograph.tiling.region import Region, can_be_placed
from zerograph.tiling.token_region import in_both_phases

log = logging.getLogger(__name__)


def prepare_parts(gm: fx.GraphModule, plan: Plan) -> int:
    """Tag nodes of the joint graph ``gm``; returns the number of layers whose gradients were named."""
    if not plan.by_sample:
        return 0
    ready, backward = 0, backward_nodes(gm.graph)
    for product in list(wide_products(gm.graph.nodes, _that_save(plan))):
        try:
            forward, both = in_both_phases(product, batch_region, backward)
        except Mixes as error:
            log.warning("the layer of %s may run whole: %s", product.meta["zg"].name, error)
            continue
        for node in filter(is_view, forward.nodes):
            cut = forward.cuts[node]
            if cut is not None and isinstance(node.meta["val"], torch.Tensor) and not can_be_placed(node, cut):
                _recompute_views(node)
        gradients = [node for node in both.nodes if node in backward and _has_samples(node, both)]
        for node in gradients:
            node.meta["zg"] = LayerGradient(product.meta["zg"].name, both.count)
        ready += bool(gradients)
        if not gradients and not backward.isdisjoint(both.nodes) and _is_saved(product, plan):
            log.warning("the backward of %s runs whole: no product makes a gradient of it", product.meta["zg"].name)
    return ready


def _that_save(plan: Plan) -> list[str]:
    """The regions of layers that save more than what enters and leaves them."""
    saving = {layer_of_activation(name) for name in plan.save}
    nothing = frozenset(plan.recompute) - saving
    return [name for name in plan.token_regions if layer_of_activation(name) not in nothing]


def _has_samples(node: fx.Node, region: Region) -> bool:
    """Whether ``node`` is a product whose rows are samples, as one is that makes the gradient of what another reads."""
    cut = region.cuts[node]
    return node.target in PRODUCTS and cut is not None and cut.dims == ROWS.dims


def _is_saved(product: fx.Node, plan: Plan) -> bool:
    name = product.meta["zg"].name
    return name in plan.save or layer_of_activation(name) not in plan.recompute


def _recompute_views(node: fx.Node) -> None:
    """Have the backward make the view ``node`` again, and all views that it is of."""
    while is_view(node):
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
        node = node.args[0]  # type: ignore[assignment]
