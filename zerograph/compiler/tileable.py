"""Which parts of a traced step can run in tiles over tokens.

Capture asks before there is a plan. Inductor's passes over the joint graph come later, and may leave a part that cannot
run in tiles any more. The plan then has that part whole, so that reports and plan files tell how the step runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from zerograph.compiler.source_lines import source_line
from zerograph.core.plan import Plan
from zerograph.core.step import Step, TokenRegion, layer_of_activation
from zerograph.graph.costs import bytes_of, describing_sizes
from zerograph.graph.layers import layer_of_node
from zerograph.graph.nodes import Activation, backward_nodes
from zerograph.tiling.cuts import PRODUCTS, ROWS, Mixes
from zerograph.tiling.layer_batch import batch_region
from zerograph.tiling.layer_tokens import layer_region, wide_products
from zerograph.tiling.loss_gradients import loss_gradients
from zerograph.tiling.region import Counts, Region
from zerograph.tiling.token_region import head_of, in_both_phases, region_of

log = logging.getLogger(__name__)

_NAMELESS = "Inductor's passes left no product of that name"


def left_in_tiles(step: Step, plan: Plan, graph: fx.Graph) -> Step:
    """``step`` without the parts that ``plan`` has in tiles and that cannot run so in ``graph``.

    Warns of MLPs; of a loss the one who changes the plan warns.

    Args:
        graph: the step as Inductor's passes left it.

    Returns:
        The very ``step``, where the plan can be carried out.
    """
    backward = backward_nodes(graph)
    if plan.loss_tiles > 1 and (why := _why_head_is_untiled(plan, graph, backward)):
        step = replace(step, untiled_logits=why, loss_gradients=())
    if gone := _untiled_regions(plan, graph, backward):
        regions = tuple(region for region in step.token_regions if region.activation not in gone)
        step = replace(step, token_regions=regions)
    return step


def _why_head_is_untiled(plan: Plan, graph: fx.Graph, backward: set[fx.Node]) -> str:
    head = head_of(graph.nodes, plan)
    return why_logits_are_untiled(head, backward) if head is not None else f"{_NAMELESS} ({plan.head})"


def _untiled_regions(plan: Plan, graph: fx.Graph, backward: set[fx.Node]) -> set[str]:
    """The MLPs that ``plan`` has in tiles of tokens and that cannot run so in ``graph``, with a warning."""
    if not plan.token_regions:
        return set()
    untiled = dict.fromkeys(plan.token_regions, _NAMELESS)
    sizes = describing_sizes(graph)
    again = _computed_again([n for n in graph.nodes if n.op == "call_function" and n not in sizes], backward)
    for product in wide_products(graph.nodes, plan.token_regions):
        name = product.meta["zg"].name
        del untiled[name]
        try:
            region = batch_region if plan.by_sample else layer_region
            _layer_region(layer_of_activation(name), product, backward, again, region)
        except Mixes as error:
            untiled[name] = f"{error} ({source_line(error.node)})"
    for name, why in list(untiled.items())[:1]:  # the others are of layers like its own, most often
        log.warning(
            "%d %s were planned, and %s%d layers run whole, %s because %s",
            plan.token_tiles, "parts of the batch" if plan.by_sample else "tiles of tokens",
            "" if plan.by_sample else "the MLPs of ", len(untiled), name, why,
        )  # fmt: skip
    return set(untiled)


def why_logits_are_untiled(product: fx.Node, backward: set[fx.Node]) -> str:
    """Why the logits that ``product`` makes cannot be made for some tokens at a time; empty where they can.

    The backward that makes them again is looked at as it will be: with what it needs of the forward.
    """
    try:
        in_both_phases(product, region_of, backward)
    except Mixes as error:
        return f"{error} ({source_line(error.node)})"
    return ""


def gradients_ahead(graph: fx.Graph, product: fx.Node) -> tuple[str, ...]:
    """The names of the backward's nodes that a loss in tiles computes in the forward."""
    try:
        found = loss_gradients(graph, region_of(product))
    except Mixes:
        return ()
    return tuple(node.name for node in found.nodes) if found is not None else ()


def token_regions(
    nodes: Sequence[fx.Node], backward: set[fx.Node], params_read: Mapping[str, tuple[str, ...]]
) -> Iterator[TokenRegion]:
    """For each layer that has one, the MLP that can run for some tokens at a time; ``params_read`` is by operation."""
    again = _computed_again(nodes, backward)
    for layer, widest in _widest_products(nodes, backward).items():
        # Of several MLPs in a layer it may be that only the last one's middle is not needed before its gradients are.
        for product in widest:
            try:
                both = _layer_region(layer, product, backward, again)
            except Mixes as error:
                log.debug("%s runs for all tokens at once: %s", layer, error)
                continue
            yield _token_region(layer, product, both, params_read)
            break


def batch_regions(
    nodes: Sequence[fx.Node], backward: set[fx.Node], params_read: Mapping[str, tuple[str, ...]]
) -> tuple[list[TokenRegion], dict[str, str]]:
    """The layers that can run for some samples at a time, and why others cannot; ``params_read`` is by operation."""
    again, found, whole = _computed_again(nodes, backward), list[TokenRegion](), dict[str, str]()
    products = _widest_products(nodes, backward)
    for node in nodes:
        if (layer := layer_of_node(node)) and layer not in products and node not in backward:
            whole[layer] = "it has no linear layer, at which parts begin"
    for layer, (product, *_) in products.items():
        try:
            both = _layer_region(layer, product, backward, again, batch_region)
            _check_once(layer, both, nodes, backward)
        except Mixes as error:
            whole[layer] = f"{error} ({source_line(error.node)})"
            continue
        found.append(_token_region(layer, product, both, params_read, samples=both.count))
    return found, whole


def _check_once(layer: str, region: Region, nodes: Sequence[fx.Node], backward: set[fx.Node]) -> None:
    """Refuse a layer that runs again on what it made."""
    behind = set(region.exits())
    for node in nodes:
        if node not in backward and node not in region.cuts and not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
            if layer_of_node(node) == layer and node.target in PRODUCTS:
                raise Mixes(node, "is of a layer that runs more than once")


def _widest_products(nodes: Sequence[fx.Node], backward: set[fx.Node]) -> dict[str, list[fx.Node]]:
    """By layer, its widest products with a lasting name."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        fact = node.meta.get("zg")
        if node.target in PRODUCTS and node not in backward and isinstance(fact, Activation):
            found.setdefault(layer_of_activation(fact.name), []).append(node)
    most = {layer: max(map(bytes_of_node, products)) for layer, products in found.items() if layer}
    return {layer: [n for n in found[layer] if bytes_of_node(n) == size] for layer, size in most.items()}


def _token_region(
    layer: str, product: fx.Node, both: Region, params_read: Mapping[str, tuple[str, ...]], *,
    samples: int | None = None,
) -> TokenRegion:  # fmt: skip
    multiply = [node for node in both.nodes if node.target in PRODUCTS]
    inside = [n for n in both.nodes if both.cuts[n] is not None and all(user in both.cuts for user in n.users)]
    return TokenRegion(
        layer=layer,
        activation=product.meta["zg"].name,
        params=tuple(dict.fromkeys(name for node in both.nodes for name in params_read.get(node.name, ()))),
        values=tuple(node.name for node in inside),
        moved=tuple((node.name, _moved_by_each_tile(node, both)) for node in multiply),
        sums=tuple(node.name for node in multiply if both.cuts[node] is None),
        samples=samples,
    )


def _layer_region(
    layer: str, product: fx.Node, backward: set[fx.Node], again: Mapping[fx.Node, str],
    region: Callable[[fx.Node, Counts], Region] = layer_region,
) -> Region:  # fmt: skip
    """The region of ``layer`` in its backward, where some of it is computed ``again``.

    Raises:
        Mixes: forward or backward need it for all tokens at once.
    """
    return in_both_phases(product, region, backward, lambda node: again.get(node) == layer)[1]


def _computed_again(nodes: Sequence[fx.Node], backward: set[fx.Node]) -> dict[fx.Node, str]:
    """The nodes, by layer, that a backward recomputes of layers that save nothing: what a layer hands on is there."""
    layers = {node: layer_of_node(node) for node in nodes if node not in backward}
    found: dict[fx.Node, str] = {}
    for node in reversed(nodes):
        if not (layer := layers.get(node)):
            continue
        handed_on = any(
            user.op == "output" or (user not in backward and layers.get(user) not in (layer, None))
            for user in node.users
        )
        if not handed_on and any(user in backward or user in found for user in node.users):
            found[node] = layer
    return found


def _moved_by_each_tile(product: fx.Node, region: Region) -> int:
    cut = region.cuts[product]
    weight: fx.Node = product.args[-1 if cut and cut.dims == ROWS.dims else -2]  # type: ignore[assignment]
    return bytes_of_node(weight) if cut is not None else 2 * bytes_of_node(product)


def bytes_of_node(node: fx.Node) -> int:
    val = node.meta.get("val")
    return bytes_of(val) if isinstance(val, torch.Tensor) else 0  # parts of a tuple are values of their own
