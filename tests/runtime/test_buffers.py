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


def test_what_does_not_fit_the_next_bucket_goes() -> None:
    pool = BufferPool()
    large = pool.take(10_000)
    del large
    small = pool.take(1000)
    assert [len(buffer) for buffer in pool._buffers] == [len(small)]


def test_one_free_buffer_is_kept_that_fits() -> None:
    pool = BufferPool()
    buffers = [pool.take(size) for size in (900, 1000, 1100, 1200, 2000)]
    del buffers
    taken = pool.take(1000)
    assert sorted(map(len, pool._buffers)) == [1000, 1200] and len(taken) == 1000


def test_what_is_read_stays() -> None:
    pool = BufferPool()
    read = pool.take(10_000)
    pool.take(1000)
    assert sorted(map(len, pool._buffers)) == [1000, 10_000] and len(read) == 10_000
