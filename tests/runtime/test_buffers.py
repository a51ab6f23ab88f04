"""Memory of gathered buckets is used again, and never while something still reads it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.instructions import Compute, Free, Gather, Instruction, WaitGather
from zerograph.core.machine import machine_named
from zerograph.core.program import Program, Register, Segment
from zerograph.runtime.buffers import BufferPool
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate


@dataclass
class Allocator:
    """Memory that is counted while it lives."""

    _made: list[weakref.ref[torch.Tensor]] = field(default_factory=list)

    def __call__(self, size: int) -> torch.Tensor:
        self._made.append(weakref.ref(made := torch.empty(size, dtype=torch.uint8)))
        return made

    def alive(self) -> list[int]:
        return sorted(made.nbytes for each in self._made if (made := each()) is not None)


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
    allocator = Allocator()
    pool = BufferPool(allocator)
    embedding = pool.take(10_000)
    del embedding
    sizes = []
    for _ in range(3):
        pool.take(1000)
        sizes.append(allocator.alive())
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
    allocator = Allocator()
    pool = BufferPool(allocator)
    read = pool.take(10_000)
    for _ in range(3):
        pool.take(1000)
    pool.trim()
    assert allocator.alive() == [10_000] and len(read) == 10_000


def test_what_goes_is_gone_before_new_memory_is_asked_for() -> None:
    asked: list[list[int]] = []
    allocator = Allocator()

    def allocate(size: int) -> torch.Tensor:
        asked.append(allocator.alive())
        return allocator(size)

    pool = BufferPool(allocate)
    for size in (1000, 3000, 9000):
        pool.take(size)
    assert asked == [[], [1000], [3000]]


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([1000, 1100, 1249, 1250, 1251, 3000])), max_size=20))
def test_forecasts_count_what_the_pool_holds(uses: list[tuple[int, int]]) -> None:
    """Of each use, a bucket that is freed before it, if it is there, and the size of the one that is gathered."""
    allocator = Allocator()
    pool, taken = BufferPool(allocator), dict[int, torch.Tensor]()
    instructions, held = list[Instruction](), list[int]()
    for bucket, (earlier, size) in enumerate(uses):
        if (gone := bucket - 1 - earlier) in taken:
            del taken[gone]
            instructions.append(Free(gone, (gone,), (gone,)))
        taken[bucket] = pool.take(size)
        instructions += [Gather(bucket, (), (), bucket), WaitGather(bucket, (), bucket=bucket), Compute(0, (), ())]
        held.append(sum(allocator.alive()))
    contents = [Register(f"bucket {i}", size, i, "gathered") for i, (_, size) in enumerate(uses)]
    program = Program("inference", 0, len(uses), instructions, (), [Segment("", 1)], contents, carries=True)
    found, holdings = simulate([program], Rates(machine_named("cpu"), 2, "float32"))
    computing = [span for span in found.spans if span.stream == "compute"]
    assert [sum(h.bytes for h in holdings if h.held_at(s.start, found.spans)) for s in computing] == held
    assert not held or found.peaks["device"].bytes == max(held)
