"""A parameter group as the native optimizers see it: local tensors, and gradients laid out like them."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import zerograph._core as _core
from zerograph.core.errors import UnsupportedError
from zerograph.runtime import kernels
from zerograph.runtime.dtensors import Groups, groups_of_ranks, is_partial
from zerograph.runtime.torch_private import local_tensor

TAGS: dict[torch.dtype, _core.DType] = {
    torch.float32: _core.DType.float32,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float16: _core.DType.float16,
}
"""The dtypes that the kernels compute on."""

_NOTHING = torch.zeros(1, device="cpu")
NOTHING = _NOTHING.data_ptr()
"""Where an empty tensor is said to lie: address 0 stands for no tensor at all."""

Elements = tuple[int, _core.DType, int]
"""Address, dtype and number of elements of one tensor."""


def uses_kernels(local: Tensor) -> bool:
    """Whether ``local`` lies where our kernels work; elsewhere torch's do."""
    return local.is_cpu


def pieces(tensors: Sequence[Tensor]) -> list[Elements]:
    """The pieces of dense ``tensors``, in whatever order their elements lie."""
    return [(t.data_ptr(), TAGS[t.dtype], t.numel()) for t in tensors]


def sum_of(squares: Iterable[float]) -> float:
    """Rounded once, so that it does not matter in which order or by whom they were computed."""
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf


def on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can read all of ``tensors``."""
    return all(t.is_cpu and t.dtype in TAGS and t.layout is torch.strided for t in tensors)


def on_gpu(grads: Sequence[Tensor]) -> bool:
    """Whether all of ``grads`` lie on one GPU, and our kernels there can read them."""
    device = grads[0].device
    return kernels.available(device) and all(
        g.device == device and g.dtype in kernels.DTYPES and g.layout is torch.strided for g in grads
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` fills one piece of memory, in any order of its dimensions (channels_last is one)."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


@dataclass(slots=True)
class Gradients:
    """One step's gradients of one group, on this rank.

    Attributes:
        tensors: in the group's order; None where there is none.
        addresses: of each; 0 where there is none, and never for one that is merely empty.
        complete: every parameter has one.
    """

    tensors: list[Tensor | None]
    addresses: list[int]
    complete: bool

    def of(self, indices: Sequence[int]) -> Gradients:
        """Those of some parameters."""
        if len(indices) == len(self.tensors):
            return self
        tensors = [self.tensors[i] for i in indices]
        return Gradients(
            tensors, [self.addresses[i] for i in indices], self.complete or all(t is not None for t in tensors)
        )


class GroupLayout:
    """The parameters of one group as they were last seen; :meth:`describes` tells whether they still are.

    Attributes:
        params: in the group's order.
        locals: this rank's part of each.
        over: the ranks that hold different parts of it, over which its norm is summed; of each.
        dtypes: of each gradient that was seen last.
        changes: how often one of ``dtypes`` changed.
    """

    def __init__(self, group: Mapping[str, Any], params: Sequence[Tensor] | None = None) -> None:
        """``params`` are those of ``group`` that are meant; all, unless given."""
        self.params: list[Tensor] = list(group["params"] if params is None else params)
        names = names_in(group)
        self.names: Sequence[str] = [names[id(p)] for p in self.params if id(p) in names]
        self.locals = [local_tensor(p) for p in self.params]
        self.over: list[Groups] = [groups_of_ranks(p) for p in self.params]
        self.dtypes: list[torch.dtype | None] = [None] * len(self.params)
        self.changes = 0
        self._tags = [_core.DType.float32] * len(self.params)
        self._sharded: list[Any] = [p for p in self.params if isinstance(p, DTensor)]
        self._shards = [local_tensor(p) for p in self._sharded]
        self._placements: list[Any] = [None] * len(self.params)  # of the gradients that were seen last
        self._strided = [t for t in self.locals if t.layout is torch.strided]  # others have no address
        self._addresses = list(map(Tensor.data_ptr, self._strided))
        self._counts = [t.numel() for t in self.locals]
        self._where = [o if uses_kernels(t) else None for o, t in zip(self.over, self.locals, strict=True)]
        self._kinds = set(self._where)
        self._ordinary = all(t.is_contiguous() for t in self._strided)

    def describes(self, params: Sequence[Tensor]) -> bool:
        """Whether ``params`` are the same objects and lie in the same memory."""
        return (
            len(params) == len(self.params)
            and all(map(operator.is_, params, self.params))
            and all(map(operator.is_, map(local_tensor, self._sharded), self._shards))
            and list(map(Tensor.data_ptr, self._strided)) == self._addresses
        )

    def pieces(self, grads: Gradients, over: Groups) -> list[Elements]:
        """The gradients on the host of those that are split ``over`` these ranks; of whole ones ``over`` none."""
        if over not in self._kinds:
            return []
        rows = zip(grads.addresses, self._tags, self._counts, strict=True)
        if grads.complete and len(self._kinds) == 1:
            return list(rows)
        return list(
            itertools.compress(rows, [a and o == over for a, o in zip(grads.addresses, self._where, strict=True)])
        )

    def elsewhere(self, grads: Gradients, over: Groups) -> list[Tensor]:
        """The same of those on devices."""
        if None not in self._kinds:
            return []
        rows = zip(grads.tensors, self.over, self._where, strict=True)
        return [g for g, o, where in rows if g is not None and where is None and o == over]

    @property
    def is_elsewhere(self) -> bool:
        """Whether no parameter is on the host."""
        return self._kinds == {None}

    @functools.cached_property
    def devices(self) -> frozenset[torch.device]:
        """Where this rank's parts are."""
        return frozenset(t.device for t in self.locals)

    @functools.cached_property
    def split(self) -> dict[Groups, Tensor]:
        """The ranks over which parameters are split, and for each such kind one of them.

        Raises:
            UnsupportedError: one is a part of a sum, whose norm no ranks know.
        """
        for i, p in enumerate(self.params):
            if self.over[i] and is_partial(p):
                raise UnsupportedError(
                    f"{self.name(i)} is placed as {p.placements}: ranks hold parts of a sum, which have no norm",  # type: ignore[attr-defined]
                    "make the optimizer with skip_nonfinite=False, and clip with torch.nn.utils.clip_grad_norm_",
                )
        return {over: p for over, p in reversed(list(zip(self.over, self.params, strict=True))) if over}

    def gradients(self) -> Gradients:
        """This rank's part of each gradient, laid out as its parameter is.

        Raises:
            UnsupportedError: a gradient that is sparse or of another shape, or a parameter that no kernel can update.
        """
        found = [p.grad for p in self.params]
        if self._sharded:
            rows = enumerate(zip(found, self._placements, strict=True))
            found = [
                local_tensor(g) if type(g) is DTensor and g.placements is seen else self._local(i, g)
                for i, (g, seen) in rows
            ]
        return self.gradients_of(found)

    def gradients_of(self, found: list[Tensor | None]) -> Gradients:
        """The same of this rank's parts of gradients."""
        complete = all(map(operator.is_not, found, itertools.repeat(None)))  # `in` would compare tensors
        if not self._as_before(found):
            found = [g if g is None else self._examined(i, g) for i, g in enumerate(found)]
        addresses = [0 if g is None else g.data_ptr() for g in found]
        # An empty tensor lies at address 0, which stands for no gradient.
        if 0 in addresses:
            addresses = [a or (0 if g is None else NOTHING) for a, g in zip(addresses, found, strict=True)]
        return Gradients(found, addresses, complete)

    def _local(self, index: int, grad: Tensor | None) -> Tensor | None:
        """This rank's part of ``grad``, brought to where its parameter is."""
        param = self.params[index]
        if grad is None or not isinstance(param, DTensor):
            return grad
        if not isinstance(grad, DTensor):
            raise UnsupportedError(
                f"{self.name(index)} is placed as {param.placements}, its gradient {tuple(grad.shape)} is plain",
                "assign a DTensor: DTensor.from_local(grad, param.device_mesh, param.placements)",
            )
        if grad.placements != param.placements:
            return local_tensor(grad.redistribute(param.device_mesh, param.placements))
        self._placements[index] = grad.placements
        return local_tensor(grad)

    def _as_before(self, grads: Sequence[Tensor | None]) -> bool:
        """Whether nothing needs a closer look. Few operations per gradient: there may be hundreds in every step."""
        rows = zip(grads, self.dtypes, self._counts, strict=True)
        try:
            alike = [g is None or (g.dtype is d and g.is_contiguous() and g.numel() == n) for g, d, n in rows]
            return self._ordinary and all(alike)
        except RuntimeError:  # sparse ones have no order
            return False

    def _examined(self, index: int, grad: Tensor) -> Tensor:
        local = self.locals[index]
        if grad.dtype is not self.dtypes[index]:
            self._check(index, grad)
        if grad.layout is torch.strided and grad.shape == local.shape and grad.stride() == local.stride():
            return grad
        return self._fitted(grad, index)

    def _fitted(self, grad: Tensor, index: int) -> Tensor:
        local = self.locals[index]
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{self.name(index)} has a gradient of layout {grad.layout}",
                "build its module with sparse=False, or give it to torch.optim.SparseAdam",
            )
        if grad.shape != local.shape:
            raise UnsupportedError(
                f"{self.name(index)} has shape {tuple(local.shape)} on this rank, its gradient {tuple(grad.shape)}",
                "zero_grad() after changing a parameter's shape",
            )
        if grad.is_contiguous() and local.is_contiguous():
            return grad  # strides of dimensions of one element say nothing
        return torch.empty_like(local, dtype=grad.dtype).copy_(grad)

    def _check(self, index: int, grad: Tensor) -> None:
        local, name = self.locals[index], self.name(index)
        if local.is_meta:
            raise UnsupportedError(
                f"{name} is on the meta device and has no values", "call zerograph.materialize(model) first"
            )
        if local.is_complex() or grad.is_complex():
            raise UnsupportedError(f"{name} is complex", "store its real and imaginary parts as two real parameters")
        if not is_dense(local):
            raise UnsupportedError(
                f"{name} of shape {tuple(local.shape)} has strides {local.stride()}: it is a part of a larger tensor",
                "make it contiguous before the optimizer sees it: nn.Parameter(p.detach().contiguous())",
            )
        for what, dtype in (("", local.dtype), ("its gradient ", grad.dtype)):
            if dtype not in TAGS and (uses_kernels(local) or not dtype.is_floating_point):
                raise UnsupportedError(
                    f"{name}: {what}is {dtype}, and the kernels know {', '.join(map(str, TAGS))}",
                    "convert it, or use the optimizer of torch.optim",
                )
        self.dtypes[index], self._tags[index] = grad.dtype, TAGS.get(grad.dtype, _core.DType.float64)
        self.changes += 1

    def name(self, index: int) -> str:
        """The name of a parameter in errors."""
        known = self.names[index] if index < len(self.names) else f"{index} of its group"
        return f"parameter {known}"


def names_in(group: Mapping[str, Any]) -> dict[int, str]:
    """The names of a group's parameters by ``id``, where the optimizer was given them."""
    return dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
