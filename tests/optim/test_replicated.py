"""Parameters that tensor parallelism leaves whole, with gradients that are the same on its ranks, and others."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from zerograph.core.errors import UnsupportedError
from zerograph.optim.replicated import refuse_different_gradients
from zerograph.runtime.joined import joined


def _compares() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    both = joined(mesh["data"], mesh["tensor"])

    def param(placement: Placement, grad: float | None) -> nn.Parameter:
        made = nn.Parameter(DTensor.from_local(torch.ones(4), both, [Shard(0), placement], run_check=False))
        if grad is not None:
            made.grad = DTensor.from_local(torch.full((4,), grad), both, [Shard(0), placement], run_check=False)
        return made

    own = 1.0 + dist.get_rank()
    refuse_different_gradients([param(Shard(0), own), param(Replicate(), 1.0), param(Replicate(), None)], {})
    refuse_different_gradients([nn.Parameter(torch.ones(2))], {})
    whole = [param(Replicate(), 1.0), param(Replicate(), None)]
    with torch.device("meta"):  # a default device says where the user's tensors are made
        refuse_different_gradients(whole, {})
    wrong = param(Replicate(), own)
    noise, overflow = param(Replicate(), 1e-9 * own), param(Replicate(), own if own == 1 else math.inf)
    refuse_different_gradients([param(Replicate(), 1.0), noise, overflow], {})
    with pytest.raises(UnsupportedError, match=r"parameter norm is not split by tensor parallelism.* 2 on one.* 4 on"):
        refuse_different_gradients([param(Replicate(), 1.0), wrong], {id(wrong): "norm"})


def test_gradients_are_compared() -> None:
    run(2, _compares)
