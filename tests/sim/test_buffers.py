"""Free buffers are chosen when they fit, wait one turn, and go; forecasts count them until then."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.instructions import Compute, Free, Gather, Instruction, WaitGather
from zerograph.core.machine import machine_named
from zerograph.core.program import Program, Register, Segment
from zerograph.core.timeline import Forecast
from zerograph.sim.buffers import FreeBuffers
from zerograph.sim.rates import Rates
from zerograph.sim.simulate import simulate

CPU = machine_named("cpu")
SIZES = st.sampled_from([1000, 1100, 1249, 1250, 1251, 3000])


@dataclass(eq=False)
class Buffer:
    nbytes: int


@given(st.lists(st.tuples(SIZES, st.booleans())))
def test_what_is_chosen_fits_best_and_what_is_passed_over_twice_goes(turns: list[tuple[int, bool]]) -> None:
    free = FreeBuffers[Buffer]()
    passed_over: dict[Buffer, int] = {}  # by free buffer, how often
    for size, frees in turns:
        if frees:
            passed_over[buffer := Buffer(size)] = 0
            free.add(buffer)
            continue
        fits = [b.nbytes for b in passed_over if 4 * size <= 4 * b.nbytes <= 5 * size]
        chosen, gone = free.take(size)
        assert (chosen.nbytes if chosen is not None else None) == min(fits, default=None)
        if chosen is not None:
            del passed_over[chosen]
        assert set(gone) == {b for b, times in passed_over.items() if times}
        passed_over = {b: times + 1 for b, times in passed_over.items() if not times}
        assert len(list(free)) == len(passed_over)
    assert set(free.clear()) == set(passed_over) and not list(free)


def forecast(programs: list[tuple[str, list[Instruction]]], sizes: list[int], overlaps: bool = False) -> Forecast:
    """Of programs that gather buckets of these ``sizes``; register ``i`` is what bucket ``i`` is gathered into."""
    contents = [Register(f"bucket {i}", size, i, "gathered") for i, size in enumerate(sizes)]
    machine = CPU if not overlaps else machine_named("h100-80gb")
    made = [
        Program(kind, 0, len(sizes), tuple(instructions), (), [Segment("", 1, flops=10**9)], contents, carries=True)
        for kind, instructions in programs
    ]
    return simulate(made, Rates(machine, 2, "float32"))[0]


def begin(bucket: int) -> Gather:
    return Gather(bucket, (), (), bucket, bytes=10**6)


def again(bucket: int) -> Gather:
    """Of a bucket that the forward has kept."""
    return replace(begin(bucket), resident=True)


def used(bucket: int, resident: bool = False, ends: bool = False) -> list[Instruction]:
    free = Free(bucket, (bucket,), (bucket,), resident, ends=ends)
    return [WaitGather(bucket, (), bucket=bucket), Compute(0, (), ()), free]


def levels(found: Forecast) -> list[int]:
    """Bytes while each task computes."""
    curve = found.memory.get("device", ())
    return [[size for time, size in curve if time <= s.start][-1] for s in found.spans if s.stream == "compute"]


def test_a_bucket_that_is_gathered_ahead_takes_memory_when_it_is_waited_for() -> None:
    step = [("inference", [begin(0), begin(1), *used(0), *used(1)])]
    assert levels(forecast(step, [100, 200])) == [100, 300]  # the free buffer does not fit, and waits
    assert levels(forecast(step, [100, 200], overlaps=True)) == [300, 200]


def test_a_free_buffer_is_used_again_or_goes() -> None:
    one = [("inference", [i for b in range(4) for i in (begin(b), *used(b))])]
    assert levels(forecast(one, [100, 100, 90, 80])) == [100] * 4
    assert levels(forecast(one, [100, 10, 10, 10])) == [100, 110, 10, 10]


def test_a_backward_that_gathers_nothing_anew_begins_without_free_buffers() -> None:
    forward = [begin(0), *used(0), begin(1), *used(1, resident=True)]
    nothing = [again(1), *used(1, ends=True)]
    assert levels(forecast([("forward", forward), ("backward", nothing)], [100, 10])) == [100, 110, 10]
    more = [*nothing, begin(0), *used(0)]
    assert levels(forecast([("forward", forward), ("backward", more)], [100, 10])) == [100, 110, 110, 100]


def test_a_bucket_that_was_resident_takes_all_free_buffers_with_it() -> None:
    forward = [begin(0), *used(0), begin(1), *used(1, resident=True)]
    backward = [again(1), begin(2), *used(1, ends=True), *used(2)]
    found = forecast([("forward", forward), ("backward", backward)], [100, 10, 40])
    assert levels(found) == [100, 110, 110, 40]


def test_what_no_bucket_takes_is_reported_as_a_free_buffer() -> None:
    step = [("inference", [i for b in range(2) for i in (begin(b), *used(b))])]
    contents = [Register(name, size, i, "gathered") for i, (name, size) in enumerate((("x", 100), ("y", 10)))]
    program = Program("inference", 0, 2, step[0][1], (), [Segment("", 1)], contents, ["embed", "block"], carries=True)
    _, holdings = simulate([program], Rates(CPU, 2, "float32"))
    assert {(h.name, h.kind, h.bytes, h.first, h.last) for h in holdings} == {
        ("embed", "gathered", 100, 0, 1),
        ("free buffer, of embed before", "temporary", 100, 2, -1),
        ("block", "gathered", 10, 2, 3),
    }
