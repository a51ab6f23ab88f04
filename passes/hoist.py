"""Compute what the forward computes for the backward where its inputs are made, instead of at the forward's end.

Where saving the result of an operator costs no more than saving its input (a norm's ``rsqrt / width``) the partitioner
moves it from the backward into the forward, and leaves it where the joint graph has it: behind the loss, for all layers
at once. There it keeps inputs of every layer alive, fuses with nothing, and makes of the forward's last segment one
that grows with depth. Moved up, each operator stands in its layer, and layers that are alike stay alike.

Safe because what moves is pure and moves no further than behind the last of its inputs; what reads an input that the
forward overwrites stays where it is.
"""

from __future__ import annotations

import operator

from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Pair, readings_of_overwritten
from zerograph.graph.torch_private import OpOverload


def hoist(pair: Pair, plan: Plan | None = None) -> int:
    """Move operators of the backward in the forward up to their inputs; returns how many have moved.

    Reads no plan.
    """
    forward = pair.forward
    nodes = list(forward.graph.nodes)
    stay = set(readings_of_overwritten(nodes))
    placed: set[fx.Node] = set()
    moved = 0
    for node in nodes:
        if node in stay or not _may_move(node):
            continue
        before = _last_input(node)
        while before.next in placed:
            before = before.next  # in the order in which they were
        if before.next is not node:
            before.append(node)
            moved += 1
        placed.add(node)
    return moved


def _last_input(node: fx.Node) -> fx.Node:
    """The node that ``node`` can stand behind: the last of its inputs, but all inputs of the graph come first."""
    last = max(node.all_input_nodes)  # nodes compare by where they stand
    while last.op == "placeholder" and last.next.op == "placeholder":
        last = last.next
    return last


def _may_move(node: fx.Node) -> bool:
    """Whether ``node`` is the backward's, computes something from inputs, and does nothing else."""
    known = isinstance(node.target, OpOverload) or node.target is operator.getitem
    of_backward = node.meta.get("partitioner_tag") == "is_backward"
    return known and of_backward and bool(node.all_input_nodes) and not node.is_impure()
