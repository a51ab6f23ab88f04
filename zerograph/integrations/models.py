"""The handling of a model's calls and its micro-batches that all integrations share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerograph.api import Backend
from zerograph.core.errors import ConfigError
from zerograph.runtime.joined import other_axis
from zerograph.sharding.torch_private import compile_any_call


def compile_call(module: nn.Module, backend: Backend) -> None:
    """Have calls of ``module`` compiled, in place; ``module.compile()`` does nothing for classes of ``torch.nn``."""
    if type(module).__module__.startswith("torch.nn."):
        compile_any_call(module, backend)
    else:
        module.compile(backend=backend)


def held_back(backend: Backend) -> AbstractContextManager[None]:
    """Holds gradients back at stages 0 and 1. At 2 and 3, as under DeepSpeed, every backward reduces: whole gradients
    on every rank are what those stages promise not to have."""
    return backend.no_sync() if backend.config.sharding < 2 else nullcontext()


def require_parallel(model: nn.Module, axis: DeviceMesh, size: str, hint: str) -> None:
    """Whether ``model`` computes on ``axis``, over which ranks share samples, as ``size`` told.

    Raises:
        ConfigError: it does not: these ranks would train copies that know nothing of each other.
    """
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    if not any(axis in (mesh, other_axis(mesh)) for mesh in meshes):  # before it is sharded, and after
        raise ConfigError(f"{size} was given, and {type(model).__name__} is not parallel", hint)
