"""Bare collectives between CPU ranks of one host: the shared-memory mailbox against gloo.

    python benchmarks/collectives.py [--world 2] [--repeats 15] [--sizes 1 8 32 128]

The size is that of the gathered tensor (all-gather) or of the full gradient (reduce-scatter), in MiB of float32. Both
transports run interleaved in one process group; a sample is the slower rank's time, GB/s is size / median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zerograph._core import DType, Mailbox


def connect(rank: int, world: int) -> Mailbox:
    token = [int.from_bytes(os.urandom(8), "little")]
    dist.broadcast_object_list(token)
    box = Mailbox(rank, world, token[0])
    ranks: list[tuple[int, int]] = [(0, 0)] * world
    dist.all_gather_object(ranks, (box.pid, box.control_fd))
    box.connect(ranks)
    return box


def collectives(box: Mailbox, rank: int, world: int, count: int) -> dict[str, dict[str, Callable[[], None]]]:
    """Closures over `count` elements in all; every one leaves its result in `out`."""
    chunk = count // world
    full = torch.full((count,), float(rank + 1))
    shard, gathered = torch.full((chunk,), float(rank + 1)), torch.empty(count)
    out = torch.empty(chunk)
    f32 = DType.float32

    def gather() -> None:
        ticket = box.start_gather(1, [(shard.data_ptr(), chunk, f32, f32)])
        box.finish_gather(ticket, [(gathered.data_ptr(), chunk)], 60.0)

    def reduce() -> None:
        ticket = box.start_reduce(2, [(full.data_ptr(), count, chunk, f32)])
        box.finish_reduce(ticket, [(out.data_ptr(), f32)], 1.0, 60.0)

    def gather_bf16() -> None:
        ticket = box.start_gather(3, [(shard.data_ptr(), chunk, f32, DType.bfloat16)])
        box.finish_gather(ticket, [(gathered.data_ptr(), chunk)], 60.0)

    half = torch.empty(count, dtype=torch.bfloat16)
    return {
        "all-gather": {
            "mailbox": gather,
            "gloo": lambda: dist.all_gather_into_tensor(gathered, shard),
        },
        "all-gather, float32 sent as bfloat16": {
            "mailbox": gather_bf16,
            "gloo": lambda: dist.all_gather_into_tensor(half, shard.bfloat16()),
        },
        "reduce-scatter": {
            "mailbox": reduce,
            "gloo": lambda: dist.reduce_scatter_tensor(out, full),
        },
    }


def measure(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, of the slower rank."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 2):
        for name, call in variants.items():
            dist.barrier()
            begin = time.perf_counter()
            call()
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if repeat >= 2:
                samples[name].append(seconds.item())
    return {name: statistics.median(values) for name, values in samples.items()}


def worker(rank: int, world: int, port: int, sizes: list[int], repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    box = connect(rank, world)
    if rank == 0:
        print(f"{world} ranks, 1 thread each, torch {torch.__version__}\n")
        print(f"{'collective':38}{'MiB':>5}{'mailbox':>12}{'gloo':>12}{'mailbox':>10}{'gloo':>8}{'ratio':>8}")
        print(f"{'':43}{'ms':>12}{'ms':>12}{'GB/s':>10}{'GB/s':>8}")
    for size in sizes:
        count = size * 2**18 // world * world
        for name, variants in collectives(box, rank, world, count).items():
            times = measure(variants, repeats)
            ours, theirs = times["mailbox"], times["gloo"]
            if rank == 0:
                print(
                    f"{name:38}{size:5}{ours * 1e3:12.3f}{theirs * 1e3:12.3f}"
                    f"{count * 4e-9 / ours:10.2f}{count * 4e-9 / theirs:8.2f}{theirs / ours:7.1f}x",
                    flush=True,
                )
    box.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--port", type=int, default=29617)
    args = parser.parse_args()
    mp.spawn(worker, args=(args.world, args.port, args.sizes, args.repeats), nprocs=args.world)


if __name__ == "__main__":
    main()
