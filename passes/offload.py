"""Move saved activations off the device in the forward, and bring them back before the backward needs them.

In the forward, where the last layer ends that reads a value, the value leaves, and what stands for it is saved:

    offloaded = zg.spill_saved([value, ...])

In the backward it begins to come back ``plan.fetch_ahead`` layers before the one that needs it, where it is waited for:

    pending = zg.fetch_saved(offloaded); ...; value, ... = zg.wait_fetch_saved(pending, offloaded)

Tensors that look at one memory move together. Safe because nothing writes to a saved value, and no operator of the
forward reads one after it has left. The model's outputs stay, and so do inputs, tensors on the processor beside an
accelerator, and nodes that Inductor's own passes have put in the place of an activation that the plan names. Needs
forwards in which no operator moves any more.
"""

from __future__ import annotations

import logging
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, fx

from zerograph.core.machine import Tier
from zerograph.core.plan import Plan
from zerograph.core.step import layer_of_activation
from zerograph.graph.costs import bytes_of, memory_owner
from zerograph.graph.layers import layer_of_node, layer_starts
from zerograph.graph.nodes import Activation, Pair, SavedFact, call, output_of, positions
from zerograph.graph.ops import FETCH_SAVED, SPILL_SAVED, UNSHARD, WAIT_FETCH_SAVED

log = logging.getLogger(__name__)


def offload(pair: Pair, plan: Plan) -> int:
    """Rewrite both graphs of ``pair`` in place; returns the number of tensors that leave the device."""
    tier_of = dict(plan.offload)
    groups = _leaving(pair, tier_of)
    _warn(pair, tier_of)
    if groups:
        _spill(pair, groups, tier_of)
        _fetch(pair.backward.graph, groups, tier_of, plan.fetch_ahead)
    return sum(len(tensors) for tensors, _ in groups.values())


_Groups = Mapping[fx.Node, tuple[list[fx.Node], str]]
"""By memory that leaves, the saved tensors of the forward that look at it, and what the plan calls it."""


def _leaving(pair: Pair, tier_of: Mapping[str, Tier]) -> _Groups:
    returned: Sequence[object] = output_of(pair.forward.graph).args[0]  # type: ignore[assignment]
    users = {memory_owner(n) for n in returned[: pair.outputs] if isinstance(n, fx.Node)}
    found: dict[fx.Node, tuple[list[fx.Node], str]] = {}
    saved = [n for n in returned[pair.outputs :] if isinstance(n, fx.Node) and isinstance(n.meta.get("val"), Tensor)]
    is_accelerated = any(not n.meta["val"].is_cpu for n in saved)
    for node in dict.fromkeys(saved):
        owner = memory_owner(node)
        what = next((name for name in _names(owner) if name in tier_of), None)
        if what is not None and owner not in users and not (is_accelerated and node.meta["val"].is_cpu):
            found.setdefault(owner, ([], what))[0].append(node)
    return found


def _names(owner: fx.Node) -> tuple[str | None, ...]:
    """The names that a plan may use for the memory of ``owner``: its activation and layer, or the layer alone."""
    if owner.op != "call_function" or owner.target is UNSHARD:
        return ()
    fact = owner.meta.get("zg")
    return (fact.name, layer_of_activation(fact.name)) if isinstance(fact, Activation) else (layer_of_node(owner),)


def _warn(pair: Pair, tier_of: Mapping[str, Tier]) -> None:
    facts = (n.meta.get("zg") for graph in (pair.forward.graph, pair.backward.graph) for n in graph.nodes)
    made = {fact.name for fact in facts if isinstance(fact, Activation)}
    missing = sorted(name for name in tier_of if layer_of_activation(name) and name not in made)
    if missing:
        log.warning(
            "%s, which the plan moves off the device, is not in the graph any more: what stands for it stays",
            ", ".join(missing),
        )


def _spill(pair: Pair, groups: _Groups, tier_of: Mapping[str, Tier]) -> None:
    graph, output = pair.forward.graph, output_of(pair.forward.graph)
    order, last = positions(graph), dict[fx.Node, int]()
    for node in graph.nodes:
        for source in node.all_input_nodes if node is not output else ():
            last[memory_owner(source)] = order[node]
    cuts = [*layer_starts(graph), output]
    places = [order[cut] for cut in cuts]
    batches: dict[tuple[int, str], list[fx.Node]] = {}
    for owner, (_, what) in groups.items():
        batches.setdefault((bisect_right(places, last.get(owner, order[owner])), what), []).append(owner)
    instead: dict[fx.Node, fx.Node] = {}
    for place, what in sorted(batches):
        tensors, fact = _together(batches[place, what], groups, tier_of)
        with graph.inserting_before(cuts[place]):
            node = call(graph, SPILL_SAVED, (tensors,), [n.meta["val"] for n in tensors], tensors[-1])
            node.meta["zg"] = fact
            for k, tensor in enumerate(tensors):
                instead[tensor] = call(graph, operator.getitem, (node, k), tensor.meta["val"])
                # AOTAutograd sorts what is saved by facts of its own.
                instead[tensor].meta |= {key: fact for key, fact in tensor.meta.items() if key != "zg"}
    returned: Sequence[fx.Node] = output.args[0]  # type: ignore[assignment]
    output.args = ((*returned[: pair.outputs], *(instead.get(n, n) for n in returned[pair.outputs :])),)


def _fetch(graph: fx.Graph, groups: _Groups, tier_of: Mapping[str, Tier], ahead: int) -> None:
    given = {node.name: node for node in graph.find_nodes(op="placeholder")}
    order = positions(graph)
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    cuts = [first, *(start for start in layer_starts(graph) if start is not first)]
    places = [order[cut] for cut in cuts]
    batches: list[dict[str, list[fx.Node]]] = [{} for _ in cuts]
    for owner, (tensors, what) in groups.items():
        need = min(order[user] for tensor in tensors for user in given[tensor.name].users)
        batches[bisect_right(places, need) - 1].setdefault(what, []).append(owner)
    begun = [[_Return.of(own, groups, tier_of, given) for own in batch.values()] for batch in batches]
    for back in (back for batch in begun[:ahead] for back in batch):
        back.begin(first)
    for region, cut in enumerate(cuts):
        for back in begun[region]:
            back.wait(cut)
        for back in begun[region + ahead] if region + ahead < len(cuts) else ():
            back.begin(cut)


@dataclass(slots=True)
class _Return:
    """Tensors that come back together; ``readers`` are those of each."""

    offloaded: list[fx.Node]
    readers: list[list[fx.Node]]
    fact: SavedFact
    pending: fx.Node | None = None

    @classmethod
    def of(
        cls, owners: Sequence[fx.Node], groups: _Groups, tier_of: Mapping[str, Tier], given: Mapping[str, fx.Node]
    ) -> _Return:
        tensors, fact = _together(owners, groups, tier_of)
        offloaded = [given[tensor.name] for tensor in tensors]
        return cls(offloaded, [list(tensor.users) for tensor in offloaded], fact)

    def begin(self, place: fx.Node) -> None:
        with place.graph.inserting_before(place):
            node = call(place.graph, FETCH_SAVED, (self.offloaded,), self.offloaded[0].meta["val"].new_empty(0))
        node.meta["zg"], self.pending = self.fact, node

    def wait(self, place: fx.Node) -> None:
        graph, vals = place.graph, [tensor.meta["val"] for tensor in self.offloaded]
        with graph.inserting_before(place):
            wait = call(graph, WAIT_FETCH_SAVED, (self.pending, self.offloaded), vals)
            here = [call(graph, operator.getitem, (wait, k), val) for k, val in enumerate(vals)]
        wait.meta["zg"] = self.fact
        for tensor, back, readers in zip(self.offloaded, here, self.readers, strict=True):
            for reader in readers:
                reader.replace_input_with(tensor, back)


def _together(
    owners: Sequence[fx.Node], groups: _Groups, tier_of: Mapping[str, Tier]
) -> tuple[list[fx.Node], SavedFact]:
    """The saved tensors that look at ``owners``, and the fact about them."""
    tensors, sizes, memory = list[fx.Node](), list[int](), list[int]()
    for owner in owners:
        own, _ = groups[owner]
        memory += [len(tensors)] * len(own)
        sizes += [bytes_of(owner.meta["val"]), *[0] * (len(own) - 1)]
        tensors += own
    what = groups[owners[0]][1]
    return tensors, SavedFact(what, tier_of[what], tuple(sizes), tuple(memory))
