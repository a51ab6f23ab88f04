"""Tables that a graph reads by position, such as learned positions: which row they are read up to.

Tracing asks nobody whether a row is there, so a sequence that is longer than its table traces as any other.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from zerograph.graph.costs import traced_size
from zerograph.graph.nodes import COPIES, is_view

aten = torch.ops.aten


def last_of_range(index: Any) -> int | None:
    """The largest of the indices 0, 1, 2, ..., maybe shifted, as traced; None where they are others."""
    shift = 0
    while isinstance(index, fx.Node):
        if index.target is torch.ops.prims.iota.default:
            length, start, step = index.args[0], index.kwargs["start"], index.kwargs["step"]
            # A range that falls, or whose step is a symbol, has its largest index elsewhere.
            if not isinstance(step, int) or step <= 0:
                return None
            return shift + _size(start) + step * (_size(length) - 1)
        if index.target is aten.add.Tensor and not index.kwargs and isinstance(index.args[1], int):
            shift += index.args[1]
        elif index.target not in COPIES and not (is_view(index) and _keeps_all(index)):
            return None
        index = index.args[0]
    return None


def _keeps_all(view: fx.Node) -> bool:
    """Whether ``view`` looks at everything, once or more often."""
    values = [node.meta["val"] for node in (*view.all_input_nodes[:1], view)]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False  # one of several parts
    before, after = (prod(map(traced_size, value.shape)) for value in values)
    return view.target is aten.expand.default or before == after


def _size(argument: Any) -> int:
    """A size among a node's arguments."""
    return traced_size(argument.meta["val"] if isinstance(argument, fx.Node) else argument)
