"""The inputs of a dry run at other sizes than those the model brought, and with batch and sequence left open.

Which dimensions are batch and sequence follows from the first tensor: its first dimension is the batch; the second is
the sequence of token ids (whole numbers) and of vectors (floats with three dimensions). In the other tensors it is the
dimensions of the same sizes: the first one for the batch, any later one for the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

from zerograph.core.errors import UnsupportedError
from zerograph.symbolic import Name


@dataclass
class Vary:
    """How a dry run's inputs differ from those it was given.

    Attributes:
        sizes: batch and sequence to run at; those left out stay as they came. Once inputs were seen, all there are.
        open: what tracing leaves open; nothing is open, and the step is captured all the same, where this is empty. A
            size of 1 is traced as 2 then: tracing takes 0 and 1 for constants. None: this is no capture.
    """

    sizes: dict[Name, int]
    open: Collection[Name] | None = None
    _dims: dict[int, dict[int, Name]] = field(default_factory=dict)

    def resized(self, inputs: Sequence[Any]) -> list[Any]:
        """``inputs`` at the sizes to run at, a tensor that is given twice as one tensor."""
        first = next((x for x in inputs if isinstance(x, Tensor)), None)
        came = _sizes_of(first) if first is not None else {}
        missing = next((name for name in (*self.sizes, *(self.open or ())) if name not in came), None)
        if missing is not None:
            raise UnsupportedError(
                f"the model's inputs have no dimension that is taken for {missing}",
                "batch is the first dimension of the first tensor; sequence is the second one of token ids, or of "
                "floats with three dimensions",
            )
        self.sizes = {**came, **self.sizes}
        self._tell_apart()
        new: dict[int, Tensor] = {}
        return [self._resize(x, came, new) if isinstance(x, Tensor) else x for x in inputs]

    def mark(self, given: Tensor, fake: Tensor) -> None:
        """Tell the tracer which dimensions of ``fake``, which stands for the resized ``given``, stay open."""
        for dim, name in self._dims[id(given)].items():
            if name in (self.open or ()):
                torch._dynamo.maybe_mark_dynamic(fake, dim)  # not mark_dynamic: that fails where one cannot be open

    def _tell_apart(self) -> None:
        """No open size of 1, and two different ones where both are open: symbols are told apart by them later."""
        for name in self.open or ():
            self.sizes[name] = max(self.sizes[name], 2)
        if set(self.open or ()) == {"batch", "seq"} and self.sizes["batch"] == self.sizes["seq"]:
            self.sizes["batch"] += 1

    @property
    def open_sizes(self) -> dict[Name, int] | None:
        """The traced sizes of what is open, once inputs were seen; None where this is no capture."""
        return None if self.open is None else {name: self.sizes[name] for name in self.open}

    def _resize(self, old: Tensor, came: Mapping[Name, int], new: dict[int, Tensor]) -> Tensor:
        if id(old) not in new:
            dims = _dims_of(old, came)
            shape = [self.sizes[dims[i]] if i in dims else size for i, size in enumerate(old.shape)]
            resized = old if shape == list(old.shape) else old.new_empty(shape, requires_grad=old.requires_grad)
            self._dims[id(resized)] = dims
            new[id(old)] = resized
        return new[id(old)]


def _sizes_of(first: Tensor) -> dict[Name, int]:
    found: dict[Name, int] = {}
    if first.dim() >= 1:
        found["batch"] = first.shape[0]
    if (first.dim() >= 2 and not first.is_floating_point()) or first.dim() == 3:
        found["seq"] = first.shape[1]
    return found


def _dims_of(tensor: Tensor, came: Mapping[Name, int]) -> dict[int, Name]:
    found: dict[int, Name] = {}
    for i, size in enumerate(tensor.shape):
        if i == 0 and size == came.get("batch"):
            found[i] = "batch"
        elif i > 0 and size == came.get("seq"):
            found[i] = "seq"
    return found
