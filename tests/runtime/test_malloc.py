"""Memory that nobody uses goes back to the system, where a process has to stay small."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes, sys
from pathlib import Path
from zerograph.runtime.malloc import return_large_blocks

def resident():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) // 1024

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def block(size):
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    return address

done = return_large_blocks() if sys.argv[1] == "returns" else False
libc.free(block(30 * 2**20))  # from now on glibc serves such blocks from its heap
before = resident()
blocks = [(block(8 * 2**20), block(2**16)) for _ in range(16)]
for large, _ in blocks:
    libc.free(large)
print(done, resident() - before)
"""


def ran(how: str, **environment: str) -> tuple[bool, int]:
    """Whether blocks are returned, and MiB that stay of 128 that are free."""
    command = [sys.executable, "-c", SCRIPT, how]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | environment)
    done, left = found.stdout.split()
    return done == "True", int(left)


def test_large_blocks_go_back_when_they_are_free() -> None:
    assert ran("keeps")[1] > 100
    done, left = ran("returns")
    assert done and left < 10


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "67108864"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=67108864")],
)
def test_a_threshold_of_the_user_stays(name: str, value: str) -> None:
    done, left = ran("returns", **{name: value})
    assert not done and left > 100
