"""One linear layer in 1 to 16 tiles: peak memory, forecast and time of a step.

    torchrun --standalone --nproc-per-node 2 benchmarks/tiles.py [--rows 8192] [--width 4096] [--tiles 1 2 4 8 16]
    python benchmarks/tiles.py --path FOLDER    one rank, with everything on NVMe

Prediction. Of a weight of B bytes at most two tiles are gathered at a time, 2 B / tiles, and as much of its full
gradient is there; what stays is the same in all rows. A step in 8 tiles takes at most 1.1 of one without.

Method. Each number of tiles trains a model of its own, one after another. Peak and forecast are those of one recorded
step (docs/recording.md), of this rank's tensors; seconds are the median of the steps after it, by the clock.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from facts import describe, machine_facts
from torch import nn

import zerograph

MIB = 2**20


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    if first:
        print(describe(machine_facts("cpu")))
        print("tiles  peak MiB  forecast  of a tile  compile s  step s  ratio")
    whole = 0.0
    for tiles in args.tiles:
        found = measured(args, tiles)
        whole = whole or found["seconds"]
        if first:
            print(
                f"{tiles:5d}  {found['peak'] / MIB:8.1f}  {found['forecast'] / found['peak']:8.3f}  "
                f"{args.rows * args.width * 4 / tiles / MIB:5.1f} MiB  {found['compile']:9.1f}  "
                f"{found['seconds']:6.3f}  {found['seconds'] / whole:5.2f}"
            )
    if dist.is_initialized():
        dist.destroy_process_group()


def measured(args: argparse.Namespace, tiles: int) -> dict[str, float]:
    """Bytes and seconds of training one linear layer in so many tiles."""
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)
    model = nn.Linear(args.width, args.rows, bias=False)
    away: dict[str, Any] = {"offload": "parameters", "tier": "nvme", "path": args.path} if args.path else {}
    backend = zerograph.backend(stage=3, bucket_size="64KiB", tile=tiles, **away)
    compiled = torch.compile(model, backend=backend)
    optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(args.tokens, args.width)

    def step() -> float:
        begin = time.perf_counter()
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    step()
    step()
    with backend.record():
        step()
    seconds = statistics.median(step() for _ in range(args.steps))
    report = backend.report()
    recorded = report.recorded
    assert recorded is not None
    return {
        "peak": recorded.peak, "forecast": recorded.forecast_peak, "compile": report.compile_seconds,
        "seconds": seconds,
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=int, default=8192)
    add("--width", type=int, default=4096)
    add("--tokens", type=int, default=128)
    add("--tiles", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    add("--steps", type=int, default=5)
    add("--path", help="folder on NVMe, for one rank")
    return parser.parse_args()


if __name__ == "__main__":
    main()
