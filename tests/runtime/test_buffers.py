"""Memory of gathered buckets is used again, and never while something still reads it."""

from __future__ import annotations

import torch

from zerograph.runtime.buffers import BufferPool


def test_a_buffer_that_nothing_reads_is_used_again() -> None:
    pool = BufferPool()
    first = pool.take(1000)
    address = first.data_ptr()
    del first
    assert pool.take(990).data_ptr() == address


def test_a_kept_view_is_never_overwritten() -> None:
    pool = BufferPool()
    view = pool.take(1000)[8:16].view(torch.float32)
    assert pool.take(1000).untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def test_a_buffer_much_too_large_is_left_for_others() -> None:
    pool = BufferPool()
    large = pool.take(10_000)
    address = large.data_ptr()
    del large
    small = pool.take(1000)
    assert small.data_ptr() != address
    assert pool.take(10_000).data_ptr() == address


def test_only_a_few_free_buffers_are_kept() -> None:
    pool = BufferPool()
    buffers = [pool.take(1000 * 2**k) for k in range(6)]
    del buffers
    kept = pool.take(1)
    assert len(pool._buffers) == BufferPool.IDLE + 1
    assert kept.numel() == 1
