"""The fake device is as asynchronous as a GPU: what nobody waits for is wrong, and what is waited for is right.

These run with ``--device=fake`` (`make fake-test`).
"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch
from fake_device import device

pytestmark = pytest.mark.skipif(
    getattr(torch.accelerator.current_accelerator(), "type", "") != "fake", reason="needs --device=fake"
)


def _slow(size: int = 400) -> torch.Tensor:
    """What takes the device some milliseconds."""
    x = torch.ones(size, size, device="fake")
    for _ in range(8):
        x = x @ x / size
    return x


def test_a_copy_that_nobody_waits_for_is_late() -> None:
    target = torch.zeros(400, 400, pin_memory=True)
    target.copy_(_slow(), non_blocking=True)
    assert not target.any()
    torch.accelerator.synchronize()
    assert target.all()


def test_an_event_is_behind_what_its_stream_was_told() -> None:
    event = torch.Event("fake")
    x = _slow()
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert x.sum().item() == 400 * 400


def test_a_stream_that_waits_for_nothing_reads_what_was_there() -> None:
    other, target = torch.Stream(device="fake"), torch.zeros(400, 400, device="fake")
    target.copy_(_slow())
    with other:
        early = target.sum()
        other.synchronize()
    assert early.item() == 0
    other.wait_stream(torch.accelerator.current_stream())
    with other:
        assert target.sum().item() == 400 * 400


def test_memory_that_is_used_again_too_early_is_not_a_number() -> None:
    """Of another stream the allocator knows nothing, unless it is told."""
    main, other = torch.accelerator.current_stream(), torch.Stream(device="fake")
    found = []
    for told in (False, True):
        source, target = torch.ones(1000, device="fake"), torch.empty(1000, pin_memory=True)
        torch.accelerator.synchronize()
        with other:
            _slow()
            target.copy_(source, non_blocking=True)
        if told:
            source.record_stream(other)
        del source
        main.synchronize()
        torch.accelerator.synchronize()
        found.append(bool(target.isnan().any()))
    assert found == [True, False]


def test_an_error_of_a_kernel_is_raised_by_the_next_wait() -> None:
    wrong = torch.tensor([7], device="fake")
    picked = torch.ones(3, 2, device="fake")[wrong]  # is told without an error
    with pytest.raises(IndexError, match="out of bounds"):
        torch.accelerator.synchronize()
    del picked
    assert torch.ones(2, device="fake").sum().item() == 2


def test_random_numbers_follow_the_seed_of_the_device() -> None:
    torch.manual_seed(3)
    first, state = torch.rand(5, device="fake"), torch.fake.get_rng_state()
    second = torch.rand(5, device="fake")
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5, device="fake"), first)
    torch.fake.set_rng_state(state)
    assert torch.equal(torch.rand(5, device="fake"), second)


def test_the_state_of_random_numbers_waits_for_those_who_draw() -> None:
    """And for no other stream, which may wait for what this host sends later."""
    torch.manual_seed(3)
    torch.rand(5, device="fake")
    state = torch.fake.get_rng_state()
    other, end = torch.Stream("fake"), torch.Event("fake")
    with other:
        slow = _slow()
        end.record(other)
        assert torch.equal(torch.fake.get_rng_state(), state) and not end.query()
        drawn = torch.rand(5, device="fake")
        assert not torch.equal(torch.fake.get_rng_state(), state) and end.query()
    del slow, drawn


def test_what_the_host_waits_for_is_counted() -> None:
    library = device.load()
    library.forget_waits()
    x = _slow()
    assert not library.waits()
    x[x > 0.5].sum().item()
    x.cpu()
    assert library.waits() == {"aten::index": 1, "aten::nonzero": 1, "number": 1, "copy": 1}


READS = """
import ctypes, sys
sys.path.insert(0, {tests!r})
from fake_device import device
device.load()
import torch
x = torch.ones(3, device="fake")
torch.accelerator.synchronize()
print(x.cpu().tolist(), flush=True)
print(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])
"""


def test_the_host_cannot_read_its_memory() -> None:
    from conftest import TESTS

    command = [sys.executable, "-c", READS.format(tests=str(TESTS))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "[1.0, 1.0, 1.0]\n"
    assert done.returncode == -signal.SIGSEGV
