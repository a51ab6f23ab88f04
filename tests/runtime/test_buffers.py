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


def test_a_free_buffer_goes_when_it_was_passed_over_twice() -> None:
    pool = BufferPool()
    embedding = pool.take(10_000)
    del embedding
    sizes = []
    for _ in range(3):
        pool.take(1000)
        sizes.append(sorted(map(len, pool._buffers)))
    assert sizes == [[1000, 10_000], [1000], [1000]]


def test_buckets_that_take_turns_in_size_keep_their_memory() -> None:
    made: list[int] = []

    def allocate(size: int) -> torch.Tensor:
        made.append(size)
        return torch.empty(size, dtype=torch.uint8)

    pool = BufferPool(allocate)
    for _ in range(4):
        pool.take(1000)
        pool.take(3000)
    assert made == [1000, 3000]


def test_what_is_read_stays() -> None:
    pool = BufferPool()
    read = pool.take(10_000)
    for _ in range(3):
        pool.take(1000)
    assert sorted(map(len, pool._buffers)) == [1000, 10_000] and len(read) == 10_000
