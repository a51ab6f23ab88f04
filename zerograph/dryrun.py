"""Compile a model without running it or holding it, for any number of simulated ranks.

The model is built on the meta device, sharded there, and traced with fake tensors that claim to be on the CPU: kernels
are chosen by device, and the meta device has few.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from zerograph.errors import UnsupportedError

if TYPE_CHECKING:
    from zerograph.frame import Frame


class DryRun(BaseException):
    """Raised where a program would begin to run. Not an ``Exception``: the model may catch those."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The frames of one call of the model, and the tokens (or samples) that it was given."""

    frames: tuple[Frame, ...]
    tokens: int


def compile_only(
    make: Callable[[], Any], *, world_size: int, batch: int = 1, seq: int = 1024, **options: Any
) -> Compiled:
    """Compile forward and backward of what ``make`` returns, as rank 0 of ``world_size`` would.

    Args:
        make: returns a model, or a model and a tuple of its inputs. Called under ``torch.device("meta")``, so that
            nothing of any size is allocated.
        batch, seq: shape of the token ids that a model without inputs gets.
        options: arguments of :func:`zerograph.backend`.

    Raises:
        UnsupportedError: the model needs values (data-dependent control flow), or breaks into several graphs.
        RuntimeError: a process group exists already: this process trains.
    """
    from zerograph.api import backend, shard  # they import this module

    if dist.is_initialized():
        raise RuntimeError("a dry run simulates its ranks and cannot share a process with a process group")
    with simulated_rank(0, world_size):
        model, inputs = _made(make, batch, seq)
        ours = backend(**{"compute": "eager", **options})
        ours.runs = False
        shard(model, ours, device="cpu")
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = [_faked(x, mode) if isinstance(x, Tensor) else x for x in inputs]
        ours.replace(_fake(model, mode))
        try:
            with mode:
                torch.compile(model, backend=ours, fullgraph=True)(*inputs)
        except DryRun:
            return Compiled(tuple(ours.frames), _tokens(inputs))
        except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UnsupportedError(
                f"the model does not trace into one graph on the meta device: {reason}",
                "give a model whose forward neither needs values nor breaks the graph",
            ) from error
    raise UnsupportedError("the model computes nothing that could be compiled", "give one with a forward")


def _fake(model: nn.Module, mode: FakeTensorMode) -> dict[int, nn.Parameter]:
    """Put fake parameters and buffers in the places of those on the meta device; returns the parameters by old id."""
    new: dict[int, Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = new.setdefault(id(old), _faked(old, mode))  # type: ignore[assignment]
    return {key: value for key, value in new.items() if isinstance(value, nn.Parameter)}


def _faked(old: Tensor, mode: FakeTensorMode) -> Tensor:
    """A tensor like ``old`` that is fake, and on the CPU."""
    local = old.to_local() if isinstance(old, DTensor) else old
    with mode, torch.no_grad():
        new = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="cpu")
        if isinstance(old, DTensor):
            new = DTensor.from_local(
                new, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
            )
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _made(make: Callable[[], Any], batch: int, seq: int) -> tuple[nn.Module, Sequence[Any]]:
    with torch.device("meta"):
        found = make()
        if isinstance(found, nn.Module):
            return found, (torch.empty(batch, seq, dtype=torch.int64),)
    match found:
        case (nn.Module() as model, inputs):
            return model, inputs if isinstance(inputs, (tuple, list)) else (inputs,)
    raise UnsupportedError(
        f"the model's function returned {type(found).__name__}", "return an nn.Module, or (module, inputs)"
    )


def _tokens(inputs: Sequence[Any]) -> int:
    first = next((x for x in inputs if isinstance(x, Tensor)), None)
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[0]


@contextmanager
def simulated_rank(rank: int, world_size: int) -> Iterator[None]:
    """A default process group of ``world_size`` ranks in this one process, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        torch._dynamo.reset()
        dist.destroy_process_group()
