"""Waits of the host for a device, refused where there is no GPU: the meta device stands for one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")


class NoWaits(TorchDispatchMode):
    """Inside, what is copied between host and device raises. Values on the meta device cannot be read in any case."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        # A single number of the host's is an argument of a kernel, unless it is copied.
        here = [t for t in tensors if t.is_cpu and (t.ndim or func in _COPIES)]
        if here and any(t.device == DEVICE for t in tensors):
            raise AssertionError(f"the host waits: {func} of {[(str(t.device), tuple(t.shape)) for t in tensors]}")
        return out


_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Unread(TorchDispatchMode):
    """Inside, no single number of a tensor is read. What is read together is stacked before, and counted."""

    stacked = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for a number"
        self.stacked += func is torch.ops.aten.stack.default
        return func(*args, **(kwargs or {}))
