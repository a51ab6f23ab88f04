"""Collectives over shared memory, between real processes."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerograph._core as _core
from zerograph._core import DType, Mailbox, MismatchError, PeerError

F32, BF16, F16, F64 = DType.float32, DType.bfloat16, DType.float16, DType.float64
NUMPY = {F32: np.float32, F64: np.float64, F16: np.float16, BF16: np.uint16}
TIMEOUT = 20.0
TOKEN = 0x1234_5678_9ABC_DEF0


def address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return int(array.ctypes.data)


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def widen(values: np.ndarray, dtype: DType) -> np.ndarray:
    return from_bf16(values) if dtype == BF16 else values.astype(np.float64 if dtype == F64 else np.float32)


def narrow(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == F64:
        return values.astype(np.float64)
    single = values.astype(np.float32)  # float64 reaches the half types through float32, as in torch
    return to_bf16(single) if dtype == BF16 else single.astype(NUMPY[dtype])


def sample(seed: list[int], count: int, dtype: DType) -> np.ndarray:
    return narrow(np.random.default_rng(seed).standard_normal(count), dtype)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


# ---- processes: rank r runs body(mailbox, rank, world, *args); what it returns, or its error, comes back


def _child(body: Callable[..., Any], rank: int, world: int, pipe: Any, args: tuple[Any, ...]) -> None:
    box = Mailbox(rank, world, TOKEN)
    pipe.send((box.pid, box.control_fd))
    box.connect(pipe.recv())
    try:
        result = ("ok", body(box, rank, world, *args))
    except BaseException as error:
        result = ("error", (type(error).__name__, str(error), traceback.format_exc()))
    pipe.send(result)
    pipe.recv()  # everyone is done
    box.close()


def start(world: int, body: Callable[..., Any], *args: Any) -> list[tuple[Any, Any]]:
    # Forks of a server that only ever imported this file: quick, and free of the test session's threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pairs = []
    for rank in range(world):
        here, there = context.Pipe()
        process = context.Process(target=_child, args=(body, rank, world, there, args), daemon=True)
        process.start()
        there.close()
        pairs.append((process, here))
    addresses = [pipe.recv() for _, pipe in pairs]
    for _, pipe in pairs:
        pipe.send(addresses)
    return pairs


def outcome(pair: tuple[Any, Any]) -> Any:
    assert pair[1].poll(40), "no answer from a rank"
    return pair[1].recv()


def stop(pairs: list[tuple[Any, Any]]) -> None:
    for process, pipe in pairs:
        if process.is_alive():
            pipe.send(None)
    for process, _ in pairs:
        process.join(10)
        assert not process.is_alive()


def run(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """The results of all ranks; an error in any rank fails the test with that rank's traceback."""
    pairs = start(world, body, *args)
    outcomes = [outcome(pair) for pair in pairs]
    stop(pairs)
    for status, value in outcomes:
        assert status == "ok", value[2]
    return [value for _, value in outcomes]


def errors(world: int, body: Callable[..., Any], *args: Any) -> list[tuple[str, str, str]]:
    pairs = start(world, body, *args)
    outcomes = [outcome(pair) for pair in pairs]
    stop(pairs)
    assert all(status == "error" for status, _ in outcomes), outcomes
    return [value for _, value in outcomes]


# ---- operations with their references


def gather_case(box: Mailbox, rank: int, world: int, seed: int, pieces: list[tuple[Any, ...]]) -> Callable[[], None]:
    """pieces: (counts per rank, chunk, source dtype, wire dtype). Starts; the returned function finishes, checks."""
    inputs = [
        [sample([seed, i, r], counts[r], src) for r in range(world)] for i, (counts, _, src, _) in enumerate(pieces)
    ]
    outs = [np.full(world * chunk, 7, dtype=NUMPY[wire]) for _, chunk, _, wire in pieces]
    expected = []
    for i, (counts, chunk, src, wire) in enumerate(pieces):
        want = np.full(world * chunk, 7, dtype=NUMPY[wire])
        for r in range(world):
            value = inputs[i][r] if src == wire else narrow(widen(inputs[i][r], src), wire)
            want[r * chunk : r * chunk + counts[r]] = value
        expected.append(want)
    posted = [inputs[i][rank].copy() for i in range(len(pieces))]
    ticket = box.start_gather(
        seed, [(address(a), a.size, src, wire) for a, (_, _, src, wire) in zip(posted, pieces, strict=True)]
    )
    for array in posted:
        array[:] = 0  # the message holds its own copy

    def finish() -> None:
        box.finish_gather(ticket, [(address(o), p[1]) for o, p in zip(outs, pieces, strict=True)], TIMEOUT)
        for out, want in zip(outs, expected, strict=True):
            same_bits(out, want)

    return finish


def reduced(inputs: list[np.ndarray], dtype: DType, scale: float, out: DType) -> np.ndarray:
    total = widen(inputs[0], dtype)
    for array in inputs[1:]:
        total = total + widen(array, dtype)
    return narrow(total * total.dtype.type(scale), out)


def reduce_case(
    box: Mailbox, rank: int, world: int, seed: int, pieces: list[tuple[Any, ...]], all_reduce: bool = False
) -> Callable[[], None]:
    """pieces: (count, chunk, dtype, out dtype)."""
    scale = 1.0 / (seed % 3 + 1)
    inputs = [[sample([seed, i, r], p[0], p[2]) for r in range(world)] for i, p in enumerate(pieces)]
    own = [values[rank] for values in inputs]
    launch = box.start_all_reduce if all_reduce else box.start_reduce
    ticket = launch(seed, [(address(a), p[0], p[1], p[2]) for a, p in zip(own, pieces, strict=True)])

    def finish() -> None:
        outs, expected = [], []
        for values, array, (count, chunk, dtype, out) in zip(inputs, own, pieces, strict=True):
            want = reduced(values, dtype, scale, out)
            if all_reduce:
                outs.append(array if out == dtype else np.full(count, 7, dtype=NUMPY[out]))  # in place where it can
                expected.append(want)
            else:
                begin, end = min(count, rank * chunk), min(count, (rank + 1) * chunk)
                outs.append(np.full(end - begin + 1, 7, dtype=NUMPY[out]))
                expected.append(np.append(want[begin:end], NUMPY[out](7)))  # and not one element more
        call = box.finish_all_reduce if all_reduce else box.finish_reduce
        call(ticket, [(address(o), p[3]) for o, p in zip(outs, pieces, strict=True)], scale, TIMEOUT)
        for out, want in zip(outs, expected, strict=True):
            same_bits(out, want)

    return finish


# ---- kernels


def special_values() -> np.ndarray:
    bits = np.random.default_rng(0).integers(0, 2**32, 20001, dtype=np.uint32)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504, 65519.99, 65520, 6e-8, 2.98e-8, 6.1e-5, 1e-40, 1.0])
    return np.concatenate([bits.view(np.float32), edges.astype(np.float32)])


@pytest.mark.parametrize("target", _core.kernel_targets())
def test_conversions_match_numpy_and_torch(target: str) -> None:
    import torch

    source = special_values()
    for dtype, torch_dtype in ((F16, torch.float16), (BF16, torch.bfloat16)):
        out = np.zeros(source.size, np.uint16)
        _core.convert(target, address(source), F32, address(out), dtype, source.size)
        want = torch.from_numpy(source).to(torch_dtype).view(torch.uint16).numpy()
        nan = np.isnan(source)
        np.testing.assert_array_equal(out[~nan], want[~nan])
        back = np.zeros(source.size, np.float32)
        _core.convert(target, address(out), dtype, address(back), F32, source.size)
        assert np.isnan(back[nan]).all()
        want_back = torch.from_numpy(want.copy()).view(torch_dtype).float().numpy()
        same_bits(back[~nan], want_back[~nan])


@pytest.mark.parametrize("target", _core.kernel_targets()[1:])
def test_every_target_gives_the_bits_of_the_baseline(target: str) -> None:
    halves = np.arange(65536, dtype=np.uint16)
    for source, dtype in (
        (special_values(), F32),
        (halves, F16),
        (halves, BF16),
        (sample([1], 4099, F64), F64),
    ):
        for out in (F32, BF16, F16, F64):
            results = []
            for name in ("baseline", target):
                converted = np.zeros(source.size * 8, np.uint8)
                _core.convert(name, address(source), dtype, address(converted), out, source.size)
                total = np.zeros(source.size * 8, np.uint8)
                with np.errstate(all="ignore"):
                    shuffled = np.ascontiguousarray(source[::-1])
                sources = [address(source), address(shuffled), address(source)]
                _core.reduce(name, sources, dtype, source.size, 0.3, address(total), out)
                results.append((converted, total))
            same_bits(results[0][0], results[1][0])
            same_sums(results[0][1], results[1][1], out)


def same_sums(a: np.ndarray, b: np.ndarray, dtype: DType) -> None:
    """Equal bits, except that which of two NaN operands survives an addition is the compiler's choice."""
    count = a.size // 8
    left, right = (widen(x[: count * np.dtype(NUMPY[dtype]).itemsize].view(NUMPY[dtype]), dtype) for x in (a, b))
    nan = np.isnan(left)
    np.testing.assert_array_equal(nan, np.isnan(right))
    same_bits(left[~nan], right[~nan])


# ---- collectives


def gather_body(box: Mailbox, rank: int, world: int) -> None:
    uneven = [(3 * r) % 5 for r in range(world)]
    empty = [1 if r == 0 else 0 for r in range(world)]
    none = [0] * world
    even = [1000] * world
    pieces = [(even, 1000, F32, F32), (even, 1003, F32, BF16), (uneven, 5, F32, F16), (empty, 1, BF16, BF16)]
    pieces += [(none, 0, F32, F32), (none, 3, F64, F32), (even, 1000, BF16, F32), (even, 1000, F64, F64)]
    for seed in range(3):
        gather_case(box, rank, world, seed, pieces)()
    gather_case(box, rank, world, 9, [])()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_gather(world: int) -> None:
    run(world, gather_body)


def raw_body(box: Mailbox, rank: int, world: int) -> None:
    for raw, dtype in (
        (DType.raw1, np.uint8),
        (DType.raw2, np.int16),
        (DType.raw4, np.int32),
        (DType.raw8, np.int64),
    ):
        own = np.arange(5, dtype=dtype) + rank
        out = np.zeros(5 * world, dtype)
        ticket = box.start_gather(0, [(address(own), 5, raw, raw)])
        box.finish_gather(ticket, [(address(out), 5)], TIMEOUT)
        same_bits(out, np.concatenate([np.arange(5, dtype=dtype) + r for r in range(world)]))


def test_gather_of_opaque_elements() -> None:
    run(2, raw_body)


def reduce_body(box: Mailbox, rank: int, world: int, all_reduce: bool) -> None:
    def chunk(count: int) -> int:
        return -(-count // world)

    pieces = [(n, chunk(n), dtype, out) for n in (0, 1, 2, 5, 4099) for dtype in NUMPY for out in (F32, dtype)]
    pieces += [(10, 10, F32, F32), (3, 100, F32, BF16), (3000, chunk(3000), F64, F16)]
    for seed in range(3):
        reduce_case(box, rank, world, seed, pieces, all_reduce)()


@pytest.mark.parametrize("all_reduce", [False, True], ids=["reduce", "all_reduce"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_reductions_are_in_rank_order_to_the_bit(world: int, all_reduce: bool) -> None:
    run(world, reduce_body, all_reduce)


def all_reduce_equals_body(box: Mailbox, rank: int, world: int) -> None:
    count, chunk = 5001, -(-5001 // world)
    own = sample([5, rank], count, F32)
    part = np.zeros(chunk, np.float32)
    ticket = box.start_reduce(1, [(address(own), count, chunk, F32)])
    box.finish_reduce(ticket, [(address(part), F32)], 1 / 3, TIMEOUT)
    full = np.zeros(chunk * world, np.float32)
    ticket = box.start_gather(2, [(address(part), chunk, F32, F32)])
    box.finish_gather(ticket, [(address(full), chunk)], TIMEOUT)
    ticket = box.start_all_reduce(3, [(address(own), count, chunk, F32)])
    box.finish_all_reduce(ticket, [(address(own), F32)], 1 / 3, TIMEOUT)
    same_bits(own, full[:count])


def test_all_reduce_is_reduce_then_gather() -> None:
    run(3, all_reduce_equals_body)


def stress_body(box: Mailbox, rank: int, world: int, rounds: int) -> int:
    rng = np.random.default_rng(99)  # the same program on every rank
    flight: list[Callable[[], None]] = []
    for seed in range(rounds):
        count = int(rng.integers(0, 40_000))
        kind = rng.integers(0, 4)
        dtype = [F32, BF16, F16, F64][rng.integers(0, 4)]
        out = [F32, dtype][rng.integers(0, 2)]
        chunk = -(-count // world) + int(rng.integers(0, 3))
        if kind == 0:
            counts = [int(rng.integers(0, count + 1)) for _ in range(world)]
            flight.append(
                gather_case(box, rank, world, seed, [(counts, count, dtype, out), (counts, count, F32, BF16)])
            )
        elif kind == 3:
            box.barrier(TIMEOUT)
        else:
            flight.append(reduce_case(box, rank, world, seed, [(count, chunk, dtype, out)] * 2, all_reduce=kind == 2))
        while len(flight) > rng.integers(0, 12):
            flight.pop(int(rng.integers(0, len(flight))))()
    for finish in flight:
        finish()
    box.barrier(TIMEOUT)
    return box.bytes


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_random_programs(world: int) -> None:
    run(world, stress_body, 150)


def growth_body(box: Mailbox, rank: int, world: int) -> tuple[int, int]:
    finishers = [gather_case(box, rank, world, s, [([50_000] * world, 50_000, F32, F32)]) for s in range(60)]
    peak = box.bytes
    for finish in reversed(finishers):
        finish()
    for step in range(4 * 1024):  # the blocks above are idle now, and are let go
        own = np.array([rank], np.float32)
        out = np.zeros(world, np.float32)
        ticket = box.start_gather(step, [(address(own), 1, F32, F32)])
        box.finish_gather(ticket, [(address(out), 1)], TIMEOUT)
    return peak, box.bytes


def test_posting_never_blocks_and_memory_comes_back() -> None:
    for peak, after in run(2, growth_body):
        assert peak > 60 * 200_000
        assert after < 1 << 20


def too_many_body(box: Mailbox, rank: int, world: int) -> None:
    for _ in range(5000):
        box.start_gather(0, [])


def test_too_many_operations_in_flight_is_an_error() -> None:
    for name, text, _ in errors(2, too_many_body):
        assert name == "ValueError" and "2048 operations in flight" in text


# ---- failures


def mismatch_body(box: Mailbox, rank: int, world: int, variant: str) -> None:
    values = np.zeros(8, np.float32)
    out = np.zeros(64, np.float32)
    gather_case(box, rank, world, 1, [([4] * world, 4, F32, F32)])()  # operation 0 agrees
    odd = rank == world - 1
    if variant == "kind" and odd:
        ticket = box.start_reduce(5, [(address(values), 8, 8, F32)])
        box.finish_reduce(ticket, [(address(out), F32)], 1.0, TIMEOUT)
    elif variant == "barrier" and odd:
        box.barrier(TIMEOUT)
    elif variant == "size":
        ticket = box.start_reduce(5, [(address(values), 7 if odd else 8, 8, F32)])
        box.finish_reduce(ticket, [(address(out), F32)], 1.0, TIMEOUT)
    else:
        tag = 6 if variant == "tag" and odd else 5
        pieces = [(address(values), 4, F32, BF16 if variant == "dtype" and odd else F32)]
        pieces *= 2 if variant == "pieces" and odd else 1
        ticket = box.start_gather(tag, pieces)
        box.finish_gather(ticket, [(address(out), 4)] * len(pieces), TIMEOUT)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("variant", ["kind", "tag", "pieces", "dtype", "size", "barrier"])
def test_ranks_that_differ_all_notice(variant: str, world: int) -> None:
    begin = time.monotonic()
    for name, text, _ in errors(world, mismatch_body, variant):
        assert name == "MismatchError", text
        assert "operation 1 differs between ranks" in text
        assert "rank 0" in text or world > 2
        assert f"rank {world - 1}" in text
    assert time.monotonic() - begin < TIMEOUT / 2


def chunk_body(box: Mailbox, rank: int, world: int) -> None:
    values = np.zeros(8, np.float32)
    ticket = box.start_gather(5, [(address(values), 8 if rank else 4, F32, F32)])
    box.finish_gather(ticket, [(address(np.zeros(64, np.float32)), 8 if rank else 4)], TIMEOUT)


def test_a_peer_that_posts_more_than_the_chunk() -> None:
    pairs = start(2, chunk_body)
    status, error = outcome(pairs[0])
    assert status == "error" and error[0] == "MismatchError" and "8 elements" in error[1]
    stop(pairs)


def waiting_body(box: Mailbox, rank: int, world: int, timeout: float) -> None:
    box.barrier(TIMEOUT)
    if rank == 1:
        time.sleep(60)
    gather_case(box, rank, world, 1, [([4] * world, 4, F32, F32)])
    box.barrier(timeout)


def test_a_killed_peer_is_named_at_once() -> None:
    pairs = start(3, waiting_body, 30.0)
    time.sleep(0.3)
    pid = pairs[1][0].pid
    os.kill(pid, signal.SIGKILL)  # not collected yet: a zombie is dead too
    begin = time.monotonic()
    for rank in (0, 2):
        status, (name, text, _) = outcome(pairs[rank])
        assert status == "error" and name == "PeerError"
        assert "rank 1" in text and str(pid) in text and "barrier" in text
    assert time.monotonic() - begin < 10  # and not after the 30 s that waits are given
    pairs[1][0].join()
    stop([pairs[0], pairs[2]])


def test_timeout_names_rank_operation_and_tag() -> None:
    pairs = start(2, waiting_body, 0.3)
    status, (name, text, _) = outcome(pairs[0])
    assert status == "error" and name == "TimeoutError"
    assert "for rank 1" in text and "barrier 2" in text and "tag 0" in text
    pairs[1][0].kill()
    pairs[1][0].join()
    stop(pairs[:1])


def retry_body(box: Mailbox, rank: int, world: int) -> int:
    tries = 0
    if rank == 1:
        time.sleep(0.7)
    own, out = np.full(4, rank, np.float32), np.zeros(4 * world, np.float32)
    ticket = box.start_gather(1, [(address(own), 4, F32, F32)])
    while True:
        try:
            box.finish_gather(ticket, [(address(out), 4)], 0.1)
            break
        except TimeoutError:
            tries += 1
    np.testing.assert_array_equal(out, np.repeat(np.arange(world), 4))
    return tries


def test_finish_may_be_called_again_after_a_timeout() -> None:
    assert run(3, retry_body)[0] >= 1


def abort_body(box: Mailbox, rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(0.2)
        box.abort("the loss is NaN")
        raise RuntimeError("the loss is NaN")
    box.barrier(30.0)


def test_abort_reaches_waiting_peers() -> None:
    begin = time.monotonic()
    results = errors(3, abort_body)
    assert time.monotonic() - begin < 10
    for rank in (0, 2):
        assert results[rank][0] == "PeerError"
        assert "rank 1" in results[rank][1] and "the loss is NaN" in results[rank][1]


def abort_after_body(box: Mailbox, rank: int, world: int) -> None:
    """Rank 1 posts all that rank 0 sleeps for, and fails in what follows before rank 0 has woken up."""
    own, out = np.full(4, rank, np.float32), np.zeros(4 * world, np.float32)
    if rank == 1:
        time.sleep(0.2)
        box.start_gather(1, [(address(own), 4, F32, F32)])
        box.abort("the next program fails")
        time.sleep(0.5)
        raise RuntimeError("the next program fails")
    ticket = box.start_gather(1, [(address(own), 4, F32, F32)])
    box.finish_gather(ticket, [(address(out), 4)], TIMEOUT)
    np.testing.assert_array_equal(out, np.repeat(np.arange(world), 4))
    box.barrier(TIMEOUT)


def test_what_was_posted_before_an_abort_arrives() -> None:
    (name, text, _), _ = errors(2, abort_after_body)
    assert name == "PeerError" and "barrier" in text and "the next program fails" in text


def lost_descriptor_body(box: Mailbox, rank: int, world: int) -> None:
    """Rank 1 closes descriptors that are not its own, and opens a file under such a number."""
    own, out = np.full(4, rank, np.float32), np.full(4 * world, -7, np.float32)
    ticket = box.start_gather(1, [(address(own), 4, F32, F32)])
    if rank == 1:
        links = {int(link.name): os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_file()}
        (number,) = (fd for fd, target in links.items() if "zerograph-block" in target)
        other = os.memfd_create("other")
        os.ftruncate(other, 1 << 16)
        os.dup2(other, number)
    box.barrier(TIMEOUT)
    try:
        box.finish_gather(ticket, [(address(out), 4)], TIMEOUT)
    finally:
        assert rank == 1 or out[4] == -7
    if rank == 1:
        raise RuntimeError("it reads rank 0's message, which is as it should be")


def test_a_payload_that_is_another_file_is_refused() -> None:
    (name, text, _), _ = errors(2, lost_descriptor_body)
    assert name == "PeerError", text
    assert "not the message of rank 1 for gather 0" in text and "closed a descriptor" in text


def ended_body(box: Mailbox, rank: int, world: int) -> None:
    box.barrier(TIMEOUT)
    if rank == 1:
        box.close()
        assert not box.is_present(1)
        return
    deadline = time.monotonic() + TIMEOUT
    while box.is_present(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not box.is_present(1)


def test_whether_a_rank_is_present() -> None:
    run(2, ended_body)


def closing_body(box: Mailbox, rank: int, world: int) -> None:
    own, out = np.full(100_000, rank, np.float32), np.zeros(100_000 * world, np.float32)
    ticket = box.start_gather(1, [(address(own), own.size, F32, F32)])
    time.sleep(0.3 * rank)  # the ranks below have read everything and closed by now
    box.finish_gather(ticket, [(address(out), own.size)], TIMEOUT)
    np.testing.assert_array_equal(out, np.repeat(np.arange(world), own.size))
    box.close()


def test_close_waits_for_readers() -> None:
    run(3, closing_body)


def ctrl_c_body(box: Mailbox, rank: int, world: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
    if rank == 1:
        time.sleep(60)
    box.barrier(30.0)


def test_ctrl_c_ends_a_wait() -> None:
    pairs = start(2, ctrl_c_body)
    time.sleep(0.5)
    begin = time.monotonic()
    os.kill(pairs[0][0].pid, signal.SIGINT)
    status, (name, _, _) = outcome(pairs[0])
    assert status == "error" and name == "KeyboardInterrupt"
    assert time.monotonic() - begin < 10  # and not after the 30 s that waits are given
    pairs[1][0].kill()
    pairs[1][0].join()
    stop(pairs[:1])


def test_connecting_to_nothing_names_the_file() -> None:
    box = Mailbox(0, 2, TOKEN)
    with pytest.raises(_core.ConnectError, match="rank 1") as caught:
        box.connect([(box.pid, box.control_fd), (os.getpid(), 999_999)])
    assert caught.value.errno == 2 and caught.value.filename.endswith("/fd/999999")
    assert "hint:" in str(caught.value)


def test_another_group_s_page_is_refused() -> None:
    box, stranger = Mailbox(0, 2, TOKEN), Mailbox(1, 2, TOKEN + 1)
    with pytest.raises(_core.ConnectError, match="not its control page"):
        box.connect([(box.pid, box.control_fd), (stranger.pid, stranger.control_fd)])


def test_wrong_arguments_are_value_errors() -> None:
    with pytest.raises(ValueError, match="not in a world"):
        Mailbox(2, 2, TOKEN)
    with pytest.raises(ValueError, match="not connected"):
        Mailbox(0, 2, TOKEN).barrier(1.0)
    box = Mailbox(0, 1, TOKEN)
    one = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="cannot cast raw4 to bfloat16"):
        box.start_gather(0, [(address(one), 4, DType.raw4, BF16)])
    with pytest.raises(ValueError, match="cannot reduce raw4"):
        box.start_reduce(0, [(address(one), 4, 4, DType.raw4)])
    with pytest.raises(ValueError, match="do not cover 4"):
        box.start_reduce(0, [(address(one), 4, 3, F32)])
    with pytest.raises(ValueError, match="no gather with ticket 77"):
        box.finish_gather(77, [], 1.0)
    ticket = box.start_gather(0, [(address(one), 4, F32, F32)])
    with pytest.raises(ValueError, match="has 1 pieces, but 0"):
        box.finish_gather(ticket, [], 1.0)
    box.close()
    with pytest.raises(ValueError, match="closed"):
        box.barrier(1.0)


def test_error_types() -> None:
    assert issubclass(_core.ConnectError, OSError)
    assert issubclass(MismatchError, RuntimeError) and issubclass(PeerError, RuntimeError)
