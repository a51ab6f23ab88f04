"""Let a training forward return its loss and no logits, which nobody reads there.

Models of transformers return logits, keys and values beside the loss. An output of a graph exists whole, until the
caller lets go of it. Under ``torch.no_grad()`` nothing changes; ``model.eval()`` alone has gradients.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zerograph.compiler.torch_private import ends_at_graph_break
from zerograph.core.units import counted
from zerograph.graph.descent import reached
from zerograph.graph.nodes import output_of

log = logging.getLogger(__name__)

CompiledFunction = Callable[..., Any]


def return_loss_only(gm: fx.GraphModule) -> Callable[[CompiledFunction], CompiledFunction]:
    """Take out of Dynamo's graph ``gm`` what it returns beside its one loss; nothing where it has none, or several.

    That is what a gradient reaches, has two dimensions or more, and the loss was made of: logits, keys and values. A
    value that a graph break cuts off returns to the user's code, and stays.

    Returns:
        what makes of the compiled graph one that returns None in the place of what was taken out.
    """
    output = output_of(gm.graph)
    values: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    losses = [value for value in values if _rank(value) == 0]
    others = set[int]()
    if len(losses) == 1 and not ends_at_graph_break(gm):
        made_of = set(reached(losses, lambda node: node.all_input_nodes))
        others = {i for i, value in enumerate(values) if _rank(value) >= 2 and value in made_of}
    if not others:
        return lambda compiled: compiled
    log.info(
        "loss_only=True: this forward returns None in place of %s beside its loss; call the model under "
        "torch.no_grad() to get what it leaves out", counted(len(others), "output"),
    )  # fmt: skip
    kept = [i for i in range(len(values)) if i not in others]
    output.args = (tuple(values[i] for i in kept),)
    gm.recompile()

    def restored(compiled: CompiledFunction) -> CompiledFunction:
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
