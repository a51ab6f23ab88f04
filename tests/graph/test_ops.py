"""What tracing sees of the operators."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zerograph.graph import ops


def test_what_tracing_sees_is_the_full_shape_and_dtype() -> None:
    with FakeTensorMode():
        shard = torch.empty(3, 2)
        whole: Tensor = ops.UNSHARD(shard, [5, 2], "w", "no group", torch.bfloat16, torch.float32, True)
        assert (whole.shape, whole.dtype) == ((5, 2), torch.bfloat16)
        grad = ops.REDUCE_GRAD(whole, [3, 2], torch.float32, "w", "no group", torch.bfloat16, torch.float32, True)
        assert (grad.shape, grad.dtype) == ((3, 2), torch.float32)


def test_instructions_are_never_dispatched() -> None:
    for op in ops.INSTRUCTIONS:
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"), op
    with pytest.raises(NotImplementedError):
        ops.FREE([torch.zeros(2)], 0)


def test_a_marker_says_where_the_full_tensor_is_of_shards_that_are_elsewhere() -> None:
    with FakeTensorMode():
        shard = torch.empty(4, 3, requires_grad=True)
        there = torch.device("meta")
        full = ops.UNSHARD(shard, [4, 3], "w", "", torch.bfloat16, torch.float32, True, there)
        assert (full.device, full.dtype) == (there, torch.bfloat16)
        (grad,) = torch.autograd.grad(full.float().sum(), [shard])
        assert (grad.device, grad.dtype) == (shard.device, torch.float32)
