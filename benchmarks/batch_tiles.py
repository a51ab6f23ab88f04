"""One backward of a batch whose layers run part by part, beside a loop of as many backward() over the parts.

    python benchmarks/batch_tiles.py --directory DIR [--layers 16] [--width 1024] [--parts 8] [--rounds 5]
    python benchmarks/batch_tiles.py                         # in memory

Prediction. With all of a GPT of 200 M parameters on NVMe a loop of 8 reads parameters 16 times, and writes gradients 8
times and reads them 7 times to add to them. With `batch_tiles=8` parameters are read twice, and gradients written once:
at most 0.2 of the bytes with updates inside of the backward (`overlap=True`, which a loop cannot have), and at most
0.55 of the time. Peaks differ by the inputs of layers, which are of the whole batch: within 5%. In memory a loop moves
nothing, and the time is the same. With `--saved` nothing is computed twice, and both compute three quarters of
that: a loop, which waits for the disk, takes as long as before, and parts at most 0.55 of it with 128 tokens too. Their
peak is then larger by the activations of the whole batch.

Method. Each variant has a process of its own; steps are taken in turns, on the same data, with the same backend but for
the option. Bytes are what the process has read from and written to disks (`/proc/self/io`), peaks its own (VmHWM).
Losses of both are compared.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from facts import append_json, describe, machine_facts
from rich.console import Console

VOCAB = 8192


def main() -> None:
    args = arguments()
    console = Console(highlight=False)
    console.print(describe(facts := machine_facts("cpu")), soft_wrap=True)
    context = mp.get_context("spawn")
    names = ["loop", "tiles", *(["tiles, overlap"] if args.directory else [])]
    pools = {name: ProcessPoolExecutor(1, mp_context=context) for name in names}
    for name, pool in pools.items():
        pool.submit(prepare, name, vars(args)).result()
    taken: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(args.rounds + 1):
        for name in names if number % 2 else reversed(names):
            taken[name].append(pools[name].submit(step, number).result())
    peaks = {name: pool.submit(peak).result() for name, pool in pools.items()}
    for name, pool in pools.items():
        pool.shutdown()
        rounds = taken[name][1:]  # the first compiles
        against = [own[0] / loop[0] for own, loop in zip(rounds, taken["loop"][1:], strict=True)]
        low, middle, high = statistics.quantiles(against, n=4)
        seconds, moved = (statistics.median(each) for each in list(zip(*rounds, strict=True))[:2])
        loop_moved = statistics.median(own[1] for own in taken["loop"][1:])
        times = f"{seconds:6.2f} s, {middle:.2f} ({low:.2f} to {high:.2f}) of the loop"
        share = moved / loop_moved if loop_moved else 1
        peak_share = f"peak {peaks[name] / 1e9:.2f} GB, {peaks[name] / peaks['loop']:.3f} of the loop"
        moved_share = f"{moved / 1e9:6.2f} GB moved, {share:.3f} of the loop"
        console.print(f"{name:15} {times}; {moved_share}; {peak_share}", soft_wrap=True)
        console.print(f"{'':15} losses {[round(own[2], 5) for own in taken[name]]}")
    if args.json:
        append_json(args.json, {"facts": facts, "taken": taken, "peaks": peaks, "args": vars(args)})


_state: dict[str, Any] = {}


def prepare(name: str, args: dict[str, Any]) -> None:
    import torch
    from model import GPT, Workload

    import zerograph

    work = Workload(
        layers=args["layers"], dim=args["width"], heads=args["width"] // 64, vocab=VOCAB, batch=args["parts"],
        seq=args["seq"],
    )  # fmt: skip
    recompute, tiles = "none" if args["saved"] else "full", args["parts"] if name != "loop" else 1
    options: dict[str, Any] = {"stage": 3, "recompute": recompute, "loss_tiles": tiles}
    if args["directory"]:
        options |= {"offload": "parameters", "path": f"{args['directory']}/{name.replace(', ', '-')}"}
        Path(options["path"]).mkdir(parents=True, exist_ok=True)
    if name != "loop":
        options["batch_tiles"] = args["parts"]
    backend = zerograph.backend(**options)
    torch.manual_seed(0)
    model = GPT(work)
    model.compile(backend=backend)
    late = {"overlap": True} if name == "tiles, overlap" else {}
    optimizer = zerograph.optim.AdamW(model.parameters(), lr=1e-4, skip_nonfinite=False, **late)
    _state.update(model=model, optimizer=optimizer, parts=1 if name != "loop" else args["parts"], args=args)


def step(number: int) -> tuple[float, int, float]:
    """Seconds, bytes read and written, and the loss of one step."""
    import torch

    args, model, optimizer = _state["args"], _state["model"], _state["optimizer"]
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCAB, (args["parts"], args["seq"] + 1), generator=generator)
    begin, before, total = time.perf_counter(), moved(), 0.0
    for part in ids.chunk(_state["parts"]):
        loss = model(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / _state["parts"]
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin, moved() - before, total


def moved() -> int:
    """Bytes that this process has read from and written to disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]) + int(fields["write_bytes"])


def peak() -> int:
    """Bytes that this process has had at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--directory", help="put all on NVMe, in this folder")
    add("--layers", type=int, default=16)
    add("--width", type=int, default=1024)
    add("--seq", type=int, default=128)
    add("--parts", type=int, default=8)
    add("--rounds", type=int, default=5)
    add("--saved", action="store_true", help="save all activations, in both")
    add("--json", type=Path, help="append the result to this JSON Lines file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
