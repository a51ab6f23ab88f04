"""The inputs of a dry run: what the model brings or token ids, at the batch and the sequence that is asked for.

Which dimensions are batch and sequence follows from the first tensor that is more than a number: its first dimension is
the batch; the second is the sequence of token ids (whole numbers with two or three dimensions) and of vectors (floats
with three). Images have four dimensions, and no sequence. In the other tensors it is the dimensions of the same sizes:
the first one for the batch, any later one for the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from zerograph.core.errors import UnsupportedError
from zerograph.core.step import Dimension
from zerograph.sharding.torch_private import map_tensors, tensors_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call: those by position, and those by keyword. Tensors may be in lists and dicts among them."""


def arguments(given: Any, batch: int, seq: int, sizes: Mapping[Dimension, int]) -> Arguments:
    """The arguments of a call with the inputs ``given``, resized; a tensor that is given twice stays one tensor.

    Args:
        given: what the model brings; None: token ids of ``batch`` by ``seq``.
        sizes: batch and sequence to run at; those left out stay as they came.

    Raises:
        UnsupportedError: the inputs have no such dimension.
    """
    found = _arguments(given, batch, seq)
    came = sizes_of(found)
    for name in sizes:
        if name not in came:
            raise UnsupportedError(
                f"the model's inputs have no dimension that is taken for {name}",
                "batch is the first dimension of the first tensor; sequence is the second one of token ids, or of "
                "a tensor with three dimensions",
            )
    resized = {id(x): _resized(x, came, sizes) for x in tensors_of(found)}
    return cast(Arguments, map_tensors(lambda x: resized[id(x)], found))


def sizes_of(inputs: Any) -> dict[Dimension, int]:
    """Batch and sequence of a call's inputs, as far as there are any."""
    first = first_of(inputs)
    found: dict[Dimension, int] = {}
    if first is not None:
        found["batch"] = first.shape[0]
        if first.dim() == 3 or (first.dim() == 2 and not first.is_floating_point()):
            found["seq"] = first.shape[1]
    return found


def first_of(inputs: Any) -> Tensor | None:
    """The first tensor that is more than a number: temperatures and steps of a schedule have no batch."""
    return next((x for x in tensors_of(inputs) if x.dim()), None)


def _arguments(given: Any, batch: int, seq: int) -> Arguments:
    match given:
        case None:
            return (torch.empty(batch, seq, dtype=torch.int64, device="meta"),), {}
        case Mapping():
            return (), dict(given)
        case tuple() | list():
            return tuple(given), {}
    return (given,), {}


def _resized(old: Tensor, came: Mapping[Dimension, int], sizes: Mapping[Dimension, int]) -> Tensor:
    shape = [sizes.get(name, size) if (name := _name(i, size, came)) else size for i, size in enumerate(old.shape)]
    return old if shape == list(old.shape) else old.new_empty(shape, requires_grad=old.requires_grad)


def _name(dim: int, size: int, came: Mapping[Dimension, int]) -> Dimension | None:
    name: Dimension = "seq" if dim else "batch"
    return name if size == came.get(name) else None
