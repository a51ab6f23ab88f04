"""Inputs of a model that computes in another dtype than its users write."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def cast_inputs(roots: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast floating-point inputs of each root's forward to ``dtype``, as ``fully_shard``'s mixed precision does."""
    for root in roots:
        root.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


def _cast(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return tree_map_only(Tensor, partial(_to, dtype), (args, kwargs))


def _to(dtype: torch.dtype, value: Tensor) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
