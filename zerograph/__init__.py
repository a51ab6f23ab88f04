"""ZeroGraph: ZeRO as a compiler pass.

    model.compile(backend=zerograph.backend(stage=3))

Importing this package does not import torch; that happens on first use of a name below.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerograph import optim
    from zerograph.api import Backend, backend, backend_of, materialize, shard
    from zerograph.core import errors
    from zerograph.optim.clip import clip_grad_norm_
    from zerograph.optim.norms import norms
    from zerograph.sharding.files.export import export
    from zerograph.sharding.gathered import gathered

__version__ = "0.1.0"

_DEFINED_IN = {
    "Backend": "api",
    "backend": "api",
    "backend_of": "api",
    "clip_grad_norm_": "optim.clip",
    "export": "sharding.files.export",
    "gathered": "sharding.gathered",
    "materialize": "api",
    "norms": "optim.norms",
    "shard": "api",
}

_MODULES = {"errors": "core.errors", "optim": "optim"}

__all__ = [
    "Backend",
    "__version__",
    "backend",
    "backend_of",
    "clip_grad_norm_",
    "errors",
    "export",
    "gathered",
    "materialize",
    "norms",
    "optim",
    "shard",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
    # From now on found as any name is, without this function.
    globals()[name] = value
    return value
