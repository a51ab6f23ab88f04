"""AdamW over optimizer states on NVMe, beside the same reads and writes with nothing in between.

    python benchmarks/nvme_step.py --directory DIR [--parameters 200000000] [--rounds 7]

Prediction. The disk is what an update waits for: it takes at most 1 / 0.95 of the bare transfers, which go through the
same engine in the same order, chunk by chunk through as many slots.

Method. One process. Each round takes one update and one pass of bare transfers, in turns; the ratio is taken within a
round. Values are medians, with the quartiles of the ratio. GB/s count what is read and written together.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from facts import append_json, describe, machine_facts
from torch import nn

import zerograph
from zerograph.core.layout import Layout
from zerograph.core.plan import Bucket, Param, Placement, Plan
from zerograph.optim.ring import through_slots
from zerograph.runtime.offload.nvme import Arena, Ticket
from zerograph.runtime.offload.shards import ShardStore

WIDTH = 4096
BLOCK_ROWS = 2048  # 8 Mi parameters in a bucket, 32 MiB each


def main() -> None:
    args = arguments()
    facts = machine_facts("cpu")
    print(describe(facts))
    blocks = max(1, args.parameters // (WIDTH * BLOCK_ROWS))
    params = {f"blocks.{i}": nn.Parameter(torch.zeros(BLOCK_ROWS, WIDTH)) for i in range(blocks)}
    for param in params.values():
        param.grad = torch.randn_like(param)
    store = ShardStore(params, lambda size: Arena([args.directory], size))
    store.place(plan_of(params), moments=2)
    optimizer = zerograph.optim.AdamW(params.values(), skip_nonfinite=False)  # looks at no gradient before the update
    optimizer.store = store  # as a backend sets it
    optimizer.step()  # makes the states
    (stream,), moved = optimizer._streams.values(), sum(store.bytes().values()) * 2
    arena = store.room.arena
    assert arena is not None
    updates, bare = [], []

    def begin_all(transfer: Callable[..., Ticket], chunk: Any) -> None:
        for kind in chunk.kinds:
            stream._transfer(transfer, chunk, kind)

    for number in range(args.rounds):
        for which in ("update", "bare") if number % 2 else ("bare", "update"):
            begin = time.perf_counter()
            if which == "update":
                optimizer.step()
                updates.append(time.perf_counter() - begin)
            else:
                through_slots(
                    stream._chunks,
                    partial(begin_all, arena.read),
                    stream._wait,
                    lambda chunk: Nothing(),  # what is read is written again
                    partial(begin_all, arena.write),
                )
                bare.append(time.perf_counter() - begin)
    ratios = [b / u for b, u in zip(bare, updates, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{sum(p.numel() for p in params.values()) / 1e6:.0f} M parameters, {moved / 1e9:.2f} GB moved by each")
    print(f"update {statistics.median(updates):.2f} s, {moved / statistics.median(updates) / 1e9:.2f} GB/s")
    print(f"bare   {statistics.median(bare):.2f} s, {moved / statistics.median(bare) / 1e9:.2f} GB/s")
    print(f"bare / update {middle:.3f} ({low:.3f} to {high:.3f})")
    if args.json:
        append_json(args.json, {"facts": facts, "moved": moved, "updates": updates, "bare": bare})


def plan_of(params: dict[str, nn.Parameter]) -> Plan:
    """Every parameter a bucket, its states on NVMe."""
    described = (
        Param(name, tuple(p.shape), *["float32"] * 3, True, home=Layout("rows", 1)) for name, p in params.items()
    )
    buckets = (Bucket(i, p.name, (p,), "use", Placement(optimizer="nvme")) for i, p in enumerate(described))
    return Plan(3, 1, tuple(buckets), 1)


class Nothing:
    """The ticket of an update that does nothing."""

    ended = 0

    def wait(self) -> None:
        """At once."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--directory", type=Path, required=True)
    add("--parameters", type=int, default=200_000_000)
    add("--rounds", type=int, default=7)
    add("--json", type=Path, help="append the result to this JSON Lines file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
