"""Which activations of a recomputed layer are worth saving: a few steps from none of them to all.

Korthikanti et al. 2022 recompute what takes much memory and little work, chosen by hand. Here each layer's saved
activations are given up one after another, the one first that costs the fewest seconds per byte beside those that are
gone already, and of the stops on this way those are offered that no mixture of two others beats. Layers that are alike
stop at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zerograph.core.cost import Cost, Counted
from zerograph.core.step import layer_of_activation
from zerograph.planner.profile.liveness import Graph, saved
from zerograph.sim.rates import Rates

STOPS = 3
"""Places between saving nothing of a layer and all, at most: each costs the search candidates, and little is gained."""
FEW_LAYERS = 3
"""Layers up to which stops are offered that mixtures of others beat: there are not enough layers to mix."""
MOST = 16
"""Activations of a layer that are looked at one by one, the largest; the rest goes first."""
LEAST = 0.02
"""Share of what a layer could save that makes a stop another one than nothing, or all."""


class Stop(NamedTuple):
    """One way to save some of what a layer could.

    Attributes:
        saved_set: activations that are saved.
        bytes: of them.
        seconds: that computing the others again takes.
    """

    saved_set: frozenset[str]
    bytes: int
    seconds: float


def stops(graph: Graph, rates: Rates) -> dict[str, tuple[frozenset[str], ...]]:
    """By layer, sets of activations to save where it is recomputed, each a part of the next.

    Neither none of them is among these nor all that the partitioner would save.
    """
    saved_until = saved(graph, "auto").until
    members: dict[str, list[int]] = {}
    for i in range(graph.backward):
        if graph.layer[i]:
            members.setdefault(graph.layer[i], []).append(i)
    wanted = {r for reads in graph.reads[graph.backward :] for r in reads}
    known: dict[object, tuple[tuple[str, ...], ...]] = {}
    found: dict[str, tuple[frozenset[str], ...]] = {}
    for layer, inside in members.items():
        work = _Layer(graph, layer, inside, wanted, saved_until, rates)
        if work.signature not in known:
            chosen = _spread(_efficient(work.way(), mixed=len(members) > FEW_LAYERS))
            known[work.signature] = tuple(tuple(name.removeprefix(layer) for name in stop.saved_set) for stop in chosen)
        found[layer] = tuple(frozenset(layer + name for name in names) for names in known[work.signature])
    return found


class _Layer:
    """The activations of one layer that can be saved, and the cost to compute the rest again."""

    def __init__(
        self,
        graph: Graph,
        layer: str,
        inside: Sequence[int],
        wanted: set[int],
        saved_until: Mapping[int, int],
        rates: Rates,
    ) -> None:
        self.graph, self.inside, self.rates = graph, inside, rates
        self.wanted = {graph.writes[i] for i in inside} & wanted
        self.sizes: dict[str, int] = {}
        for i in inside:
            value = graph.writes[i]
            name = graph.activation[i]
            known = layer_of_activation(name) == layer  # else no plan could speak of it
            if known and value in saved_until and value not in graph.leaves and graph.size[value]:
                self.sizes[name] = self.sizes.get(name, 0) + graph.size[value]
        self.signature = tuple(self._facts(i, len(layer)) for i in inside)

    def _facts(self, i: int, prefix: int) -> tuple[object, ...]:
        """The facts that tell an operation from its twin in a layer that is alike."""
        graph, value = self.graph, self.graph.writes[i]
        op, name = graph.ops[i], graph.activation[i][prefix:]
        return name, Cost.of(op), graph.size[value], value in self.wanted, value in graph.leaves

    def way(self) -> Iterator[Stop]:
        """From all that can be saved to nothing, one activation less each time."""
        largest = sorted(self.sizes, key=self.sizes.__getitem__)[-MOST:]
        saved_set = frozenset(largest)
        yield Stop(frozenset(self.sizes), sum(self.sizes.values()), 0.0)
        if len(largest) < len(self.sizes):
            yield self._stop(saved_set)
        while saved_set:
            left = [self._stop(saved_set - {name}) for name in self.sizes if name in saved_set]
            now = self._stop(saved_set)
            # Bytes differ for sure: only activations that hold some are in `sizes`.
            best = min(left, key=lambda stop: (stop.seconds - now.seconds) / (now.bytes - stop.bytes))
            saved_set = best.saved_set
            yield best

    def _stop(self, saved_set: frozenset[str]) -> Stop:
        return Stop(saved_set, sum(self.sizes[name] for name in saved_set), self._seconds(saved_set))

    def _seconds(self, saved_set: frozenset[str]) -> float:
        """The seconds to compute everything but ``saved_set`` again."""
        graph, wanted = self.graph, set(self.wanted)
        costs: list[Counted] = []
        for i in reversed(self.inside):
            value = graph.writes[i]
            if value not in wanted or value in graph.leaves or graph.activation[i] in saved_set or graph.params[value]:
                continue
            op = graph.ops[i]
            costs.append(op)
            if not op.moved:  # what fuses reads about as much as it writes
                costs.append(Cost(moved=2 * graph.size[value]))
            wanted.update(graph.reads[i])
        return self.rates.compute(Cost.of(*costs)) - self.rates.compute(Cost())


def _efficient(way: Iterable[Stop], *, mixed: bool) -> list[Stop]:
    """The stops that no other beats in bytes and seconds, and with ``mixed`` no mixture of two others, by bytes."""
    best: list[Stop] = []
    for stop in sorted(way, key=lambda stop: (stop.bytes, stop.seconds)):
        # It saves more bytes, and no time beside the one before.
        if best and stop.seconds >= best[-1].seconds:
            continue
        while mixed and len(best) > 1 and _gain(best[-2], best[-1]) <= _gain(best[-1], stop):
            best.pop()
        best.append(stop)
    # `way` begins with all that can be saved, so `best` is never empty.
    total = best[-1].bytes
    return [stop for stop in best[:-1] if LEAST * total <= stop.bytes <= (1 - LEAST) * total]


def _gain(less: Stop, more: Stop) -> float:
    """Seconds saved per byte more."""
    return (less.seconds - more.seconds) / (more.bytes - less.bytes)


def _spread(found: Sequence[Stop]) -> list[Stop]:
    """At most :data:`STOPS` of ``found``, from the first to the last."""
    if len(found) <= STOPS:
        return list(found)
    return [found[round(k * (len(found) - 1) / (STOPS - 1))] for k in range(STOPS)]
