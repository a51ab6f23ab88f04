"""What two ranks of a host, each with its device, compile of the same step; for `server.py`."""

from __future__ import annotations

import os
import traceback

import pretend
import segments
import torch
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

from zerograph.compiler.lowering.segments import SegmentCache
from zerograph.dryrun.compile_only import compile_only


def main(name: str) -> bool:
    """Compile that model for two devices at the same time; returns whether both could."""
    ranks = [_forked(name, index) for index in range(2)]
    return [os.waitpid(rank, 0)[1] for rank in ranks] == [0, 0]


def _forked(name: str, index: int) -> int:
    rank = os.fork()
    if rank:
        return rank
    try:
        os.environ["SHIM_DEVICE"] = str(index)
        _compile(name, index)
        shutdown_compile_workers()  # which outlive a process that just ends
        os._exit(0)
    finally:  # not into the server's loop
        traceback.print_exc()
        os._exit(1)


def _compile(name: str, index: int) -> None:
    pretend.pretend((8, 0))
    config.compile_threads, config.worker_start_method = 2, "fork"
    AsyncCompile.wait_pool_ready()
    with SegmentCache("inductor").kernels_in_background():
        compile_only(
            lambda: (segments.MODELS[name](), segments.batch(name)), world_size=4, device=f"cuda:{index}",
            dtype=torch.bfloat16, bucket_size="1MB", stage=3, compute="inductor",
        )  # fmt: skip
