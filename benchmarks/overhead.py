"""What the executor adds to each instruction: ``python benchmarks/overhead.py`` prints microseconds.

A program like that of one forward, with instructions that do nothing: segments return tensors that exist already, and
the transport moves no data. Every bucket is gathered, waited for, computed with and freed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerograph.core.instructions import Compute, Free, Gather, Instruction, WaitGather
from zerograph.core.layout import Layout
from zerograph.core.plan import Bucket
from zerograph.core.program import Program, Segment
from zerograph.core.step import Param
from zerograph.runtime.comm.entry import Entry
from zerograph.runtime.executor.accumulation import GradientAccumulation
from zerograph.runtime.executor.executor import Executor, Runtime
from zerograph.runtime.executor.residency import GatheredCache, StepCount
from zerograph.runtime.executor.telemetry import Telemetry
from zerograph.runtime.offload.nvme import Arena
from zerograph.runtime.offload.shards import ShardStore

BUCKETS, PARAMS, RUNS = 48, 12, 300


class Nowhere:
    """A transport that hands out what it holds."""

    name, rank, world_size, generation = "nowhere", 0, 2, 0

    def __init__(self) -> None:
        self.full = [torch.zeros(1) for _ in range(PARAMS)]

    def enter(self, entry: Entry) -> None:
        """Nobody to agree with."""

    def leave(self) -> None:
        """Nobody to wait for."""

    def abort(self, reason: str) -> None:
        """Nobody to tell."""

    def start_gather(
        self, params: Sequence[Param], shards: Sequence[Tensor], behind: Sequence[Any] = ()
    ) -> list[Tensor]:
        """Nothing to do."""
        return self.full

    def finish_gather(self, pending: list[Tensor]) -> list[Tensor]:
        """Nothing to wait for."""
        return pending


def nowhere(size: int) -> Arena:
    raise AssertionError(f"nothing leaves the device, and {size} bytes were asked for")


def executor() -> Executor:
    """A forward of ``BUCKETS`` layers with ``PARAMS`` parameters each."""
    steps: list[Instruction] = []
    buckets, inputs = [], BUCKETS * PARAMS + 1
    register, x = inputs, inputs - 1
    for index in range(BUCKETS):
        names = [f"layers.{index}.{k}" for k in range(PARAMS)]
        params = tuple(Param(n, (2,), "float32", "float32", "float32", True, Layout("rows", 1)) for n in names)
        buckets.append(Bucket(index, f"layers.{index}", params, "use"))
        shards = tuple(range(index * PARAMS, (index + 1) * PARAMS))
        full = tuple(range(register + 1, register + 1 + PARAMS))
        out = register + 1 + PARAMS
        steps += [
            Gather(index, params, shards, register, dead=shards),
            WaitGather(register, full, dead=(register,), bucket=index),
            Compute(0, (x, *full), (out,), dead=(x,)),
            Free(index, full, dead=full),
        ]
        register, x = out + 1, out
    program = Program("forward", inputs, register, tuple(steps), (x,), (Segment("0" * 16, 1),))
    accumulation = GradientAccumulation({})
    cache = GatheredCache(StepCount({}), accumulation)
    runtime = Runtime(0, Nowhere(), cache, accumulation, Telemetry(), ShardStore({}, nowhere))  # type: ignore[arg-type]
    return Executor(program, [_first], runtime)


def _first(args: list[Any]) -> list[Any]:
    return args[:1]


def main() -> None:
    """Measure and print."""
    run = executor()
    inputs = [torch.zeros(1) for _ in range(run.program.inputs)]
    times = []
    for _ in range(RUNS):
        args = list(inputs)
        start = time.perf_counter()
        run(args)
        times.append((time.perf_counter() - start) / len(run.program.instructions))
    print(
        f"{statistics.median(times) * 1e6:.2f} microseconds per instruction "
        f"(median of {RUNS} runs of {len(run.program.instructions)} instructions, {PARAMS} parameters per bucket)"
    )


if __name__ == "__main__":
    main()
