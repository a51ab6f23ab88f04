"""Optimizer states from before sharding: all ranks go on with rank 0's, as they do with parameters and buffers.

Steps before the first call are each rank's own. Left alone, whole parameters would drift apart, and split ones would
mix rows of several histories.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from zerograph.runtime.comm.axes import axes_of
from zerograph.runtime.torch_private import device_for_host, local_tensor


def early_states(named: Mapping[str, Tensor], objects: Iterable[Any]) -> dict[str, Any]:
    """The states that the optimizers among ``objects`` keep of the parameters ``named``, in an order that ranks share.

    Keys describe the state, for ranks to compare; values are the tensors, or the numbers that their keys tell.
    """
    names = {id(param): name for name, param in named.items()}
    found: dict[str, Any] = {}
    for optimizer in [o for o in objects if isinstance(o, Optimizer)]:
        for param, state in optimizer.state.items():
            for key, value in state.items() if id(param) in names else ():
                line = f"state {key} of {names[id(param)]} in {type(optimizer).__name__}: {_described(value)}"
                while line in found:  # of several optimizers of one class
                    line += ", again"
                found[line] = value
    return dict(sorted(found.items()))


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float)) else type(value).__name__


def share(tensors: Iterable[Any], mesh: DeviceMesh | None) -> None:
    """Rank 0's values into the ``tensors`` of all ranks, which have them in one order; what is none, or has no values,
    is left alone. Collective."""
    if mesh is None:
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            _share(local_tensor(tensor), axes_of(mesh).everyone)


def _share(tensor: Tensor, group: dist.ProcessGroup) -> None:
    if not tensor.numel():
        return
    # Of what expand() shows several times, once.
    tensor = tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    values = tensor.clone(memory_format=torch.contiguous_format).to(_device_of(group, tensor))
    # As bytes: gloo knows few dtypes.
    dist.broadcast(values.view(-1).view(torch.uint8), src=dist.get_global_rank(group, 0), group=group)
    with torch.no_grad():
        tensor.copy_(values)


def _device_of(group: dist.ProcessGroup, tensor: Tensor) -> torch.device:
    """Where ``group`` can send ``tensor`` from: Adam counts its steps on the CPU, which NCCL does not reach."""
    return device_for_host(group) if tensor.is_cpu else tensor.device
