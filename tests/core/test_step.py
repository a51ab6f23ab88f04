"""Arithmetic of shards, against torch.chunk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.layout import Layout
from zerograph.core.step import ITEM_SIZE, Param


def _param(*shape: int, ranks: int = 8, sharded: bool = True) -> Param:
    return Param("w", shape, "float32", "bfloat16", "float32", True, Layout.home(ranks, sharded=sharded))


@given(rows=st.integers(0, 300), world=st.integers(1, 64), columns=st.integers(0, 3))
def test_shards_are_those_of_torch_chunk(rows: int, world: int, columns: int) -> None:
    param, chunks = _param(rows, columns, ranks=world), torch.arange(rows).chunk(world)
    for rank in range(world):
        own = torch.arange(rows)[param.shard_rows(rank)]
        assert own.tolist() == (chunks[rank].tolist() if rank < len(chunks) else [])
        assert param.shard_shape(rank) == (len(own), columns)
        assert len(own) * columns <= param.chunk_elements
    assert param.chunk_elements == len(chunks[0]) * columns
    assert world * param.chunk_elements >= param.elements


def test_a_parameter_that_is_not_sharded_is_whole_everywhere() -> None:
    assert _param(sharded=False).elements == 1
    assert _param(sharded=False).chunk_elements == 1
    assert _param(3, 5, sharded=False).chunk_elements == 15
    assert _param(3, 5, sharded=False).shard_shape(7) == (3, 5)


def test_what_every_rank_holds_is_summed_in_equal_shares() -> None:
    assert [_param(3, 5, ranks=2, sharded=sharded).summed_elements for sharded in (True, False)] == [10, 8]


def test_gathered_bytes_count_the_compute_dtype() -> None:
    assert _param(3, 5).gathered_bytes == 30


@pytest.mark.parametrize("name", ITEM_SIZE)
def test_item_sizes_are_those_of_torch(name: str) -> None:
    assert getattr(torch, name).itemsize == ITEM_SIZE[name]
