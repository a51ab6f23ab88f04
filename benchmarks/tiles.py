"""One linear layer in 1 to 16 tiles: peak memory, forecast and time of a step, and what compiling it takes.

    torchrun --standalone --nproc-per-node 2 benchmarks/tiles.py [--rows 8192] [--width 4096] [--tiles 1 2 4 8 16]
    torchrun --standalone --nproc-per-node 2 benchmarks/tiles.py --rows 16384 --width 16384    # a layer of 1 GiB
    python benchmarks/tiles.py --path FOLDER    one rank, with everything on NVMe

Prediction. Of a weight of B bytes at most two tiles are gathered at a time, 2 B / tiles, and as much of its full
gradient is there; what stays is the same in all rows. A step in 8 tiles takes at most 1.1 of one without. Compiling 16
tiles takes at most 1.2 of compiling 2, since the tiles of one size share a segment.

Method. A model in one tile stays; each other number of tiles trains a model of its own beside it, and both take steps
in turns. Peak and forecast are those of one recorded step (docs/guide/recording.md), of this rank's tensors. "Theory"
is the shards of parameters, gradients and states, and what there is at once of the full gradient's tiles. Seconds are
the median of the steps after it; ratios are taken within a round, by the clock and by CPU seconds of this process:
their medians, and by the clock the quartiles. Compiling is all that the first step of the model takes beyond a later
one, tracing and C++ compilers included, with Inductor's cache and ours empty; of the model in one tile torch's imports
too. Its CPU seconds are those of all ranks, which compile for each other.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from crew import processor_seconds
from facts import describe, machine_facts
from torch import Tensor, nn

import zerograph

MIB = 2**20


@dataclass(slots=True)
class Lap:
    """Seconds by the clock, and of the processor."""

    wall: float
    cpu: float


@dataclass(slots=True)
class Training:
    """One linear layer in so many tiles, and its compiled step."""

    args: argparse.Namespace
    tiles: int
    backend: Any = field(init=False)
    compiled: Any = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    x: Tensor = field(init=False)
    first: Lap = field(init=False)

    def __post_init__(self) -> None:
        args = self.args
        torch.manual_seed(0)
        model = nn.Linear(args.width, args.rows, bias=False)
        offloaded: dict[str, Any] = {"offload": "parameters", "tier": "nvme", "path": args.path} if args.path else {}
        self.backend = zerograph.backend(stage=3, bucket_size="64KiB", tile=self.tiles, **offloaded)
        self.compiled = torch.compile(model, backend=self.backend)
        self.optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-3)
        self.x = torch.randn(args.tokens, args.width)
        # Ranks of one torchrun share it, as they do the usual one.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/zerograph-tiles-{os.getppid()}-{self.tiles}"
        self.first = self.step()

    def step(self) -> Lap:
        begin, cpu = time.perf_counter(), processor_seconds()
        self.compiled(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Lap(time.perf_counter() - begin, processor_seconds() - cpu)


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        print(describe(machine_facts("cpu")))
        print("tiles  peak MiB  forecast  theory  of a tile  compile s (CPU)  step s  ratio [quartiles]  CPU")
    untiled = Training(args, 1)
    for tiles in args.tiles:
        found = measured(untiled if tiles == 1 else Training(args, tiles), untiled)
        if first:
            print(
                f"{tiles:5d}  {found['peak'] / MIB:8.1f}  {found['forecast'] / found['peak']:8.3f}  "
                f"{theory(args, tiles) / found['peak']:6.3f}  {args.rows * args.width * 4 / tiles / MIB:5.1f} MiB  "
                f"{found['compile']:9.1f} ({found['compile_cpu']:.1f})  {found['seconds']:6.3f}  {found['ratio']:5.3f} "
                f"[{found['low']:.3f}, {found['high']:.3f}]  {found['cpu']:5.3f}",
                flush=True,
            )
        gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def theory(args: argparse.Namespace, tiles: int) -> float:
    """Bytes at the peak of a rank's step; of one with everything on NVMe there is no such number."""
    if args.path:
        return float("nan")
    untiled, world = 4 * args.rows * args.width, dist.get_world_size()
    # A tile is computed while the one before is reduced, and the last one is there with its reduced shard. The first
    # one's shard is the gradient's.
    tile = {1: 1.0, 2: 1 + 1 / world}.get(tiles, 2.0)
    return (4 / world + tile / tiles) * untiled


def measured(training: Training, untiled: Training) -> dict[str, float]:
    """Bytes and seconds of steps, beside those of the layer in one tile."""
    training.step()
    with training.backend.record():
        training.step()
    recorded = training.backend.report().recorded
    assert recorded is not None
    laps, wall, cpu = list[Lap](), list[float](), list[float]()
    for number in range(training.args.rounds):
        pair = (training, untiled) if number % 2 else (untiled, training)
        results = {each.tiles: each.step() for each in pair}
        mine, other = results[training.tiles], results[1]
        laps.append(mine)
        wall.append(mine.wall / other.wall)
        cpu.append(mine.cpu / other.cpu)
    low, middle, high = statistics.quantiles(wall, n=4)
    seconds, processor = (statistics.median(getattr(lap, name) for lap in laps) for name in ("wall", "cpu"))
    return {
        "peak": recorded.peak, "forecast": recorded.forecast_peak, "seconds": seconds,
        "compile": training.first.wall - seconds, "compile_cpu": of_all_ranks(training.first.cpu - processor),
        "low": low, "ratio": middle, "high": high, "cpu": statistics.median(cpu),
    }  # fmt: skip


def of_all_ranks(seconds: float) -> float:
    total = torch.tensor(seconds)
    if dist.is_initialized():
        dist.all_reduce(total)
    return float(total)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=8192)
    add("--width", type=int, default=4096)
    add("--tokens", type=int, default=128)
    add("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--rounds", type=int, default=5)
    add("--path", help="folder on NVMe, for one rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
