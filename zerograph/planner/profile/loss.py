"""The vocabulary head and its loss, tile by tile over tokens, so that logits never exist whole.

The largest value of many steps belongs to no layer: logits, their logarithms and their gradient, of tokens by
vocabulary each. Run for some tokens at a time, the head and the loss hold a tile of each. None of it waits for the
backward: gradients are made in the forward, where they depend on the loss's own gradient only, or else the backward
computes every tile again. (Liger and Megatron do so by kernels of their own; here it is a step with other numbers, so
that schedules, forecasts and checks need not know of it.)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from zerograph.core.plan import Plan
from zerograph.core.step import Op, Step
from zerograph.planner.profile.liveness import Graph
from zerograph.planner.profile.token_tiles import in_tiles

log = logging.getLogger(__name__)

MOST_LOSS_TILES = 64
"""Tiles of the loss, at most: each reads the head's weight again."""


LOSS_TILES = (4, 16, MOST_LOSS_TILES)
"""Numbers of tiles that are looked at where nothing fits with logits whole."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a step, and what is as large as its logits.

    Attributes:
        name: of the operation that makes the logits.
        activation: lasting name of the logits.
        params: that it reads.
        large: values that hold a number per token and word, in forward and backward.
        weights: by operation that works on them, bytes of weights that each tile moves.
        sums: the operations that sum over tokens.
        bytes: of the logits.
        others: source lines of other products that make as much, as those of a second head, which stay untiled.
    """

    name: str
    activation: str
    params: tuple[str, ...]
    large: frozenset[str]
    weights: dict[str, int]
    sums: frozenset[str]
    bytes: int
    others: tuple[str, ...] = ()


def head_of(graph: Graph) -> Head | None:
    """The head of a step; None where it has no loss of its own behind one product that follows repeated layers, or
    logits have to exist whole."""
    found = _head_or_why(graph)
    return found if isinstance(found, Head) else None


def why_untiled(step: Step, tiles: int = 1) -> str:
    """Why a training step's logits exist for all tokens at once, and what would help; empty where they need not, or
    there are none. With its loss in ``tiles`` it is asked of other heads."""
    found = _head_or_why(Graph.of(step)) if step.training else ""
    if isinstance(found, Head):
        return _of_others(found) if tiles > 1 else ""
    return found if tiles == 1 else ""


def _of_others(head: Head) -> str:
    return f"one head is in tiles, and the products of others are not ({', '.join(head.others)})" if head.others else ""


def _head_or_why(graph: Graph) -> Head | str:
    """The head, or why it stays untiled: its logits are returned, or read by a layer or another product behind it."""
    last = max((i for i in range(graph.backward) if graph.layer[i]), default=-1)
    behind = range(last + 1, graph.backward)
    products = [i for i in behind if graph.ops[i].flops and "convolution" not in graph.ops[i].target]
    if graph.step.untiled_logits:
        return graph.step.untiled_logits
    if last < 0 or not products or not graph.step.training:
        return ""
    # The vocabulary is the widest: a projection in front of the head makes less.
    product = max(products, key=lambda i: graph.size[graph.writes[i]])
    logits = _Logits(graph, product, last) if _weights(graph, product) else None
    if logits is None or logits.read_elsewhere:
        return ""
    if any(graph.owner[value] in graph.outputs for value in logits.large):
        return _why_returned(graph)
    if any(graph.values[value].kind == "gradient" for value in logits.large):
        return ""
    # A wide projection in front of the head is none.
    ahead = _ahead(graph, product)
    rest = [i for i in products if i not in ahead and graph.size[graph.writes[i]] >= logits.least]
    return Head(
        graph.ops[product].name, graph.activation[product], graph.params_read[product],
        frozenset(graph.values[value].name for value in logits.large), logits.weights, frozenset(logits.sums),
        graph.size[graph.writes[product]], tuple(graph.ops[i].source or graph.ops[i].name for i in rest),
    )  # fmt: skip


class _Logits:
    """The values that are as large as those that ``product`` makes, behind the last layer, and who works on them.

    Attributes:
        large: values that hold a number per token and word.
        least: bytes of one. Half: beside logits in 32 bit their gradient may be in 16.
        weights, sums: as a head has them.
        read_elsewhere: a layer or another product of the forward reads one.
    """

    def __init__(self, graph: Graph, product: int, last_of_layers: int) -> None:
        self.large, self.least = {graph.writes[product]}, graph.size[graph.writes[product]] // 2
        self.weights, self.sums = {graph.ops[product].name: _weights(graph, product)}, set[str]()
        self.read_elsewhere = False
        self._graph, self._behind = graph, range(last_of_layers + 1, len(graph.ops))
        for i in self._behind:
            if not self.large.isdisjoint(graph.reads[i]):
                self._follow(i)
        for i in reversed(self._behind):
            if graph.writes[i] in self.large and not graph.ops[i].flops:
                self.large.update(filter(self._is_made_for_it, graph.reads[i]))

    def _follow(self, i: int) -> None:
        """Operation ``i`` reads one."""
        graph, op = self._graph, self._graph.ops[i]
        self.read_elsewhere |= bool(graph.layer[i] or (op.flops and i < graph.backward))
        if op.flops:
            read = _weights(graph, i)
            self.weights[op.name] = read or 2 * graph.values[graph.writes[i]].bytes
            if not read:
                self.sums.add(op.name)
        elif graph.values[graph.writes[i]].bytes >= self.least:
            self.large.add(graph.writes[i])

    def _is_made_for_it(self, value: int) -> bool:
        """Whether what one is computed from is as large, and made behind the layers: the one of each token's label,
        among zeros."""
        graph, maker = self._graph, self._graph.maker[value]
        made = maker in self._behind and not graph.ops[maker].flops and not graph.params[value]
        return made and graph.values[value].bytes >= self.least


def _why_returned(graph: Graph) -> str:
    """Why logits that the step returns are whole."""
    if graph.step.ends_at_break:
        return _BROKEN_OFF
    # Without a loss of one number nobody knows whether these are logits.
    return _RETURNED if any(graph.size[value] <= _SCALAR for value in graph.outputs) else ""


_SCALAR = 8
_RETURNED = (
    "the forward returns them beside the loss; backend(loss_only=True) leaves them out where that is its one loss"
)

_BROKEN_OFF = "a graph break ends the graph in front of the loss; head and loss have to be in one graph"


def _ahead(graph: Graph, op: int) -> set[int]:
    """The operation ``op`` and those that it depends on."""
    found, waiting = set[int](), [op]
    while waiting:
        i = waiting.pop()
        if i >= 0 and i not in found:
            found.add(i)
            waiting += [graph.maker[value] for value in graph.reads[i]]
    return found


def _weights(graph: Graph, i: int) -> int:
    """Bytes of parameters that an operation reads; those that nothing shards are inputs."""
    return sum(graph.values[r].bytes for r in graph.reads[i] if graph.params[graph.owner[r]] or _is_given(graph, r))


def _is_given(graph: Graph, value: int) -> bool:
    """Whether it is an input, or a view or cast of one."""
    while (maker := graph.maker[value]) >= 0:
        if not graph.ops[maker].cheap or len(graph.reads[maker]) != 1:
            return False
        (value,) = graph.reads[maker]
    return True


def tiled(step: Step, head: Head, tiles: int) -> Step:
    """``step`` with its head and loss in ``tiles`` parts.

    One tile is held at a time of all that is as large as the logits. Products read their weight, or add to its
    gradient, once per tile, and the logits themselves are read from memory all the same. Each tile packs the weight
    again, too.
    """
    ahead = frozenset(step.loss_gradients)

    def placed(op: Op) -> Op:
        if op.name in ahead:
            op = replace(op, phase="forward")
        again = not ahead and op.phase == "forward" and op.writes[0] in head.large
        return replace(op, again=True) if again else op

    step = replace(step, ops=tuple(map(placed, step.ops)))
    return in_tiles(step, head.large, head.weights, head.sums, tiles)


def with_loss_tiles(plan: Plan, head: Head, tiles: int) -> Plan:
    """``plan`` with its loss in ``tiles`` parts, each of which reads the head's parameters whole."""
    untiled = [any(param.name in head.params for param in bucket.params) for bucket in plan.buckets]
    buckets = (replace(b, tiles=1) if reads else b for b, reads in zip(plan.buckets, untiled, strict=True))
    return replace(plan, loss_tiles=tiles, head=head.activation, buckets=tuple(buckets))


def in_loss_tiles(plan: Plan, step: Step, tiles: int) -> Plan:
    """``plan`` of ``step`` with its loss in ``tiles`` parts, which the user asked for; warns where that cannot be."""
    head = head_of(Graph.of(step)) if tiles > 1 and step.training else None
    if head is not None:
        if head.others:
            log.warning("loss_tiles=%d: logits exist for all tokens at once, because %s", tiles, _of_others(head))
        return with_loss_tiles(plan, head, tiles)
    if tiles > 1 and step.training:
        why = why_untiled(step) or "this graph has no loss behind logits of its own: compute it in the forward"
        log.warning("loss_tiles=%d: logits exist for all tokens at once, because %s", tiles, why)
    return plan


def loss_tiles(head: Head, size: int) -> tuple[int, ...]:
    """Numbers of tiles that are worth a look: as many as make one of the logits take ``size`` bytes, and the root of
    that."""
    most = min(-(-head.bytes // max(1, size)), MOST_LOSS_TILES)
    return tuple(sorted({round(most**0.5), most} - {0, 1}))
