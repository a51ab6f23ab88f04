"""What the native optimizers see of a parameter group: local tensors, and gradients laid out like them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from zerograph import _core
from zerograph.errors import UnsupportedError

TAGS: dict[torch.dtype, _core.DType] = {
    torch.float32: _core.DType.float32,
    torch.bfloat16: _core.DType.bfloat16,
    torch.float16: _core.DType.float16,
}
"""What the kernels compute on."""

Piece = tuple[int, _core.DType, int]
"""Address, dtype and number of elements of one tensor."""


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def pieces(tensors: Sequence[Tensor]) -> list[Piece]:
    """Of dense ``tensors``, in whatever order their elements lie."""
    return [(t.data_ptr(), TAGS[t.dtype], t.numel()) for t in tensors]


def on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether the kernels can read all of ``tensors``."""
    return all(t.is_cpu and t.dtype in TAGS and t.layout is torch.strided for t in tensors)


def is_dense(tensor: Tensor) -> bool:
    """Whether ``tensor`` fills one piece of memory, in any order of its dimensions (channels_last is one)."""
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


class Layout:
    """The parameters of one group as they were last seen; :meth:`describes` tells whether they still are.

    Attributes:
        params: in the group's order.
        locals: this rank's part of each.
        split: whether ranks hold different parts of it, so that its norm is summed over ranks.
    """

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.params: list[Tensor] = list(group["params"])
        self.names: Sequence[str] = group.get("param_names", ())
        self.locals = [local_of(p) for p in self.params]
        self.split = [isinstance(p, DTensor) and any(isinstance(x, Shard) for x in p.placements) for p in self.params]
        self._sharded = [(p, t) for p, t in zip(self.params, self.locals, strict=True) if p is not t]
        self._strided = [t for t in self.locals if t.layout is torch.strided]  # others have no address
        self._addresses = list(map(Tensor.data_ptr, self._strided))
        self._rows = [
            (p, isinstance(p, DTensor), t.shape, t.stride()) for p, t in zip(self.params, self.locals, strict=True)
        ]
        self._checked: list[torch.dtype | None] = [None] * len(self.params)

    def describes(self, params: Sequence[Tensor]) -> bool:
        """Whether ``params`` are the same objects and lie in the same memory."""
        return (
            len(params) == len(self.params)
            and all(map(operator.is_, params, self.params))
            and all(p._local_tensor is t for p, t in self._sharded)  # type: ignore[attr-defined]
            and list(map(Tensor.data_ptr, self._strided)) == self._addresses
        )

    @functools.cached_property
    def process_groups(self) -> frozenset[ProcessGroup]:
        """The groups over whose ranks parameters are split, each along one dimension.

        Raises:
            UnsupportedError: a parameter on a mesh of several dimensions.
        """
        found = set()
        for i, p in enumerate(self.params):
            if isinstance(p, DTensor) and self.split[i]:
                if p.device_mesh.ndim > 1:
                    raise UnsupportedError(
                        f"{self.name(i)} is placed as {p.placements}: the norm of such gradients needs many reductions",
                        "make the optimizer with skip_nonfinite=False, and clip with torch.nn.utils.clip_grad_norm_",
                    )
                found.add(p.device_mesh.get_group())
        return frozenset(found)

    def gradients(self) -> list[Tensor | None]:
        """This rank's part of each gradient, laid out as its parameter is; None where there is none.

        Raises:
            UnsupportedError: a gradient that is sparse or of another shape, or a parameter that no kernel can update.
        """
        found: list[Tensor | None] = []
        for i, (p, sharded, shape, strides) in enumerate(self._rows):
            grad = p.grad
            if grad is not None:
                if sharded:
                    grad = _like_parameter(grad, p)
                if grad.dtype is not self._checked[i]:
                    self._check(i, grad)
                if grad.layout is not torch.strided or grad.shape != shape or grad.stride() != strides:
                    grad = self._fitted(grad, i)
            found.append(grad)
        return found

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
            if dtype not in TAGS and (local.is_cpu or not dtype.is_floating_point):
                raise UnsupportedError(
                    f"{name}: {what}is {dtype}, and the kernels know {', '.join(map(str, TAGS))}",
                    "convert it, or use the optimizer of torch.optim",
                )
        self._checked[index] = grad.dtype

    def name(self, index: int) -> str:
        """What errors call a parameter."""
        known = self.names[index] if index < len(self.names) else f"{index} of its group"
        return f"parameter {known}"


def _like_parameter(grad: Tensor, param: Any) -> Tensor:
    if not isinstance(grad, DTensor):
        raise UnsupportedError(
            f"a parameter placed as {param.placements} has a plain gradient of shape {tuple(grad.shape)}",
            "assign a DTensor: DTensor.from_local(grad, param.device_mesh, param.placements)",
        )
    if grad._spec.placements != param._spec.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return grad._local_tensor
