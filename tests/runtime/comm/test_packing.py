"""Messages of collectives, as torch packs them; tests/runtime/kernels has the same by a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zerograph.core.layout import Layout
from zerograph.core.step import Param
from zerograph.runtime.comm.packing import gradient_message, means, padded_shards

CPU = torch.device("cpu")
PARAMS = [
    Param("even", (4, 3), "float32", "float32", "float32", True, Layout("rows", 1)),
    Param("uneven", (5,), "float32", "bfloat16", "float32", True, Layout("rows", 1)),
    Param("one row", (1, 2), "float32", "float32", "float32", True, Layout("rows", 1)),
]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_shards_are_cast_and_as_long_as_the_longest(world: int) -> None:
    params = [replace(p, home=Layout("rows", world)) for p in PARAMS]
    full = [torch.randn(p.shape) for p in params]
    sent = []
    for rank in range(world):
        shards = [value[p.shard_rows(rank)] for p, value in zip(params, full, strict=True)]
        sent.append(padded_shards(params, shards, CPU))
        if shards[0].is_contiguous() and world < 4:
            assert sent[-1][0].data_ptr() == shards[0].data_ptr(), "a shard that is right was copied"
    for i, (param, value) in enumerate(zip(params, full, strict=True)):
        together = torch.cat([sends[i] for sends in sent])
        dtype = getattr(torch, param.compute_dtype)
        assert torch.equal(together[: param.elements], value.reshape(-1).to(dtype))
        assert not together[param.elements :].any()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_gradients_are_cut_into_a_row_for_each_rank(world: int) -> None:
    params = [replace(p, home=Layout("rows", world)) for p in PARAMS]
    grads = [torch.randn(p.shape) for p in params]
    message = gradient_message(params, grads, torch.bfloat16, CPU)
    lengths = [p.chunk_elements for p in params]
    assert message.shape == (world, sum(lengths)) and message.dtype is torch.bfloat16
    for part, grad in zip(message.split(lengths, dim=1), grads, strict=True):
        flat = part.reshape(-1)
        assert torch.equal(flat[: grad.numel()], grad.reshape(-1).bfloat16())
        assert not flat[grad.numel() :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_what_is_not_sharded_stand_one_behind_the_other(dtype: torch.dtype) -> None:
    params = [replace(p, home=Layout("whole", 2)) for p in PARAMS]
    grads = [torch.randn(p.shape) for p in params]
    (message,) = gradient_message(params, grads, dtype, CPU)
    assert torch.equal(message, torch.cat([grad.view(-1) for grad in grads]).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_are_rounded_as_they_were_summed_and_have_memory_of_their_own(dtype: torch.dtype) -> None:
    message = torch.randn(7, dtype=dtype)
    sums = list(message.split([3, 4]))
    found = means(sums, 3, [torch.float32, torch.float16])
    assert torch.equal(found[0], (sums[0] / 3).float()) and torch.equal(found[1], (sums[1] / 3).half())
    assert len({each.untyped_storage().data_ptr() for each in (message, *found)}) == 3
    assert means([], 3, []) == []
