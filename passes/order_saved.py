"""Hand saved values over in the order that AOTAutograd reads them: tensors, then opaque objects, then sizes.

The partitioner appends the states of generators, by which it replays random operators, behind opaque objects (the
meshes of DTensors), where AOTAutograd looks for no tensor; torch 2.13 then fails an assertion in the first forward.
Safe because forward and backward are permuted alike, and neither graph computes anything else.
"""

from __future__ import annotations

import torch
from torch import fx

from zerograph.core.plan import Plan
from zerograph.graph.nodes import Pair, output_of

_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)


def order_saved(pair: Pair, plan: Plan | None = None) -> int:
    """Reorder what the forward returns behind its own outputs, and the backward reads; returns how many have moved.

    Reads no plan.
    """
    output = output_of(pair.forward.graph)
    returned = list(output.args[0])  # type: ignore[arg-type]
    saved = returned[pair.outputs :]
    # Stable: tensors keep their order among themselves, which is that of the backward's inputs.
    ordered = sorted(saved, key=lambda n: _is_opaque(n) + 2 * _is_size(n))
    moved = sum(a is not b for a, b in zip(saved, ordered, strict=True))
    if moved:
        output.args = (tuple(returned[: pair.outputs] + ordered),)
        _move_behind_tensors(pair.backward, len(saved))
    return moved


def _move_behind_tensors(backward: fx.GraphModule, saved: int) -> None:
    """Move the opaque ones of the first ``saved`` inputs behind the others."""
    inputs = list(backward.graph.find_nodes(op="placeholder", sort=True))[:saved]
    last = inputs[-1]
    for node in filter(_is_opaque, inputs):
        last.append(node)
        last = node


def _is_size(node: object) -> bool:
    return not isinstance(node, fx.Node) or isinstance(node.meta.get("val"), _SIZES)


def _is_opaque(node: object) -> bool:
    return not _is_size(node) and not isinstance(node.meta.get("val"), torch.Tensor)  # type: ignore[attr-defined]
