"""The sizes of a real model, which is built on the meta device and never run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from zerograph.core.errors import UnsupportedError
from zerograph.dryrun.compile_only import on_meta
from zerograph.planner.estimate.shapes import size_of_shapes
from zerograph.planner.estimate.sizes import ModelSize

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
"""The names by which attention modules, and the configs that they hold, have the number of their heads."""


def size_of(make: Callable[[], Any], *, heads: int | None = None, **given: int | None) -> ModelSize:
    """The sizes of what ``make`` returns: a model, or a model and its inputs. Nothing of any size is allocated.

    Args:
        heads: attention heads; else what an attention module says, else 128 wide.
        given: ``layers``, ``hidden`` or ``vocab``, in place of what is read.

    Raises:
        UnsupportedError: no model, or one without parameters.
    """
    model, _ = on_meta(make)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not shapes:
        raise UnsupportedError("the model has no parameters", "give one that can be trained")
    return size_of_shapes(shapes, heads=heads or next(_heads(model), None), **given)


def _heads(model: nn.Module) -> Iterator[int]:
    """The numbers that modules state, the innermost of each branch last: a decoder's own precedes its vision
    tower's."""
    for module in model.modules():
        for owner in (module, getattr(module, "config", None)):
            for name in HEADS:
                value = getattr(owner, name, None)
                # By type: some configs hold flags or lists under these names.
                if type(value) is int and value > 0:
                    yield value
