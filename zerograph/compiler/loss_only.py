"""Let a training forward return its loss and no logits, which nobody reads there.

Models of transformers return logits, keys and values beside the loss. What a graph returns exists whole, until the
caller lets go of it. In evaluation nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zerograph.graph.nodes import output_of

Compiled = Callable[..., Any]


def return_loss_only(gm: fx.GraphModule) -> Callable[[Compiled], Compiled]:
    """Take out of Dynamo's graph ``gm`` what it returns beside its one loss; nothing where it has none, or several.

    That is what a gradient reaches and has two dimensions or more. Numbers and vectors stay, as those of metrics.

    Returns:
        what makes of the compiled graph one that returns None in the place of what was taken out.
    """
    output = output_of(gm.graph)
    values: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    ranks = [_rank(value) for value in values]
    others = {i for i, rank in enumerate(ranks) if rank >= 2}
    if ranks.count(0) != 1 or not others:
        return lambda compiled: compiled
    kept = [i for i in range(len(values)) if i not in others]
    output.args = (tuple(values[i] for i in kept),)
    gm.recompile()

    def restored(compiled: Compiled) -> Compiled:
        def call(*args: Any) -> list[Any]:
            found: list[Any] = [None] * len(values)
            for i, value in zip(kept, compiled(*args), strict=True):
                found[i] = value
            return found

        return call

    return restored


def _rank(value: Any) -> int:
    """Dimensions of a tensor that a gradient reaches; -1 of anything else."""
    val = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return val.dim() if isinstance(val, torch.Tensor) and val.requires_grad else -1
