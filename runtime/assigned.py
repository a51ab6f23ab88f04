"""Assigned ``.data`` of sharded parameters: a DTensor keeps its rows, so the assigned values are lost.

Whoever reads values for the user, or goes on from them, asks first: optimizers' steps, state dicts and
``zerograph.gathered``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary

from zerograph.core.errors import ShardingError
from zerograph.runtime.torch_private import local_tensor


class _Memory(NamedTuple):
    """Weak references: what is freed must not be taken for what is then made at its address."""

    storage: StorageWeakRef  # stands for all of the parameter and holds nothing
    rows: weakref.ref[Tensor]  # of this rank


_MEMORY = WeakIdKeyDictionary()
# Of all backends, by parameter: modules and their copies, which have to ask, know no backend.


def remember(params: Iterable[Tensor]) -> None:
    """Know by which memory the DTensors among ``params`` are called, to see that of another assigned to one."""
    for param in params:
        if isinstance(param, DTensor):
            _MEMORY[param] = _Memory(StorageWeakRef(param.untyped_storage()), weakref.ref(local_tensor(param)))


def refuse_assigned(params: Iterable[Tensor] | None = None) -> None:
    """Refuse ``param.data = tensor``, which gives a DTensor the memory of ``tensor``, where nobody looks.

    Args:
        params: where to look; default: all parameters that any backend has sharded.

    Raises:
        ShardingError: one of them was assigned since it was remembered. It is raised once for each: a caller that
            catches it can go on.
    """
    found = list(_MEMORY.items()) if params is None else [(param, _MEMORY.get(param)) for param in params]
    for param, known in found:
        if known is None or known.storage.cdata == param.untyped_storage()._cdata:
            continue
        remember([param])
        if known.rows() is local_tensor(param):
            raise ShardingError(
                f"the .data of a parameter of shape {list(param.shape)} was assigned, which a DTensor ignores: "
                "its values are as they were",
                "change values in place (param.data.mul_(0.5), or param.copy_(other) under torch.no_grad()), or "
                "inside `with zerograph.gathered(model, writeback=True):`; merge adapters, and save the merged model, "
                "inside `with zerograph.gathered(model):`",
            )
