"""Reading a parameter of a sharded module: the full tensor, or the outward parameter where only that can answer."""

from __future__ import annotations

import dis
import functools
import sys
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerograph.core.errors import ShardingError
from zerograph.graph.ops import UNSHARD
from zerograph.lent import Assignable, lend
from zerograph.sharding.adopt import skip_frame

if TYPE_CHECKING:
    from zerograph.sharding.parametrization import Face

OF_THE_PARAMETER = frozenset({
    "grad", "requires_grad", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook",
    "shape", "ndim", "dim", "size", "numel", "nelement",
})  # fmt: skip
"""What a copy would answer wrongly, or forget; and sizes, for which one rank alone may ask."""


def getter(name: str) -> Any:
    """What the generated property ``name`` of a sharded module calls."""

    def full_parameter(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if torch.compiler.is_compiling():
            return unshard(param, self._zg_faces[name])
        return _read(param, self._zg_faces[name], sys._getframe(1))

    return full_parameter


def unshard(param: Tensor, face: Face) -> Tensor:
    """The full tensor of ``param``, in ``face.dtype``; its gradient arrives averaged over ranks."""
    if isinstance(param, DTensor):
        return UNSHARD(param.to_local(), list(param.shape), *face)
    if face.sharded:
        return param  # swapped in by torch.func.functional_call or inside zerograph.gathered
    return UNSHARD(param, list(param.shape), *face)


skip_frame(unshard)


@torch.compiler.disable
def _read(param: Tensor | None, face: Face, reader: FrameType) -> Tensor | None:
    """Outside of any graph."""
    asked = _asked_next(reader.f_code, reader.f_lasti)
    if param is None or asked in OF_THE_PARAMETER or _is_introspection(reader):
        return param
    if param.is_meta:
        raise ShardingError(
            f"parameter {face.name} is on the meta device and has no values",
            "call zerograph.materialize(model) first; an init function may touch a module's own parameters only",
        )
    differentiable = torch.is_grad_enabled()
    # Inference tensors count no versions; a parameter is no such tensor in inference_mode() either.
    with torch.inference_mode(False), torch.set_grad_enabled(differentiable):
        full = unshard(param, face)
        if type(full) is not Tensor or not isinstance(param, nn.Parameter) or _in_functorch():
            return full  # fake, or swapped in by torch.func.functional_call
        full = lend(full, param, face.name, reader)
        return full.as_subclass(Assignable) if asked == "data" else full


def _in_functorch() -> bool:
    # Its transforms allow no change of a tensor's memory, as the probe of a copy needs it.
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_introspection(reader: FrameType) -> bool:
    # DCP resolves names with getattr and throws the values away: each would cost a collective. get_parameter() is
    # asked for the nn.Parameter.
    return (
        reader.f_code is nn.Module.get_parameter.__code__
        or reader.f_code.co_name in ("extra_repr", "__repr__")  # one rank may print its model
        or reader.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
    )


@functools.lru_cache(4096)
def _asked_next(code: CodeType, at: int) -> str | None:
    """The attribute that ``code`` takes of what its instruction ``at`` reads: ``grad`` in ``model.up.weight.grad``."""
    before = ""
    for step in dis.get_instructions(code):
        if step.offset > at and not (step.opname == "CALL" and before == "PRECALL"):  # two halves, in Python 3.11
            return step.argval if step.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD") else None
        before = step.opname
    return None
