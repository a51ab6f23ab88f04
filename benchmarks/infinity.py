"""A GPT whose parameters, gradients and optimizer states are all on NVMe, in one process: memory stays small.

    python benchmarks/infinity.py --directory DIR [--parameters 3000000000] [--steps 3] [--compare]

Prediction. Memory holds what computes: two buckets that are whole, three slots of 64 MiB, torch itself (0.4 GB), and
what layers save for the backward (86 MB each at 2,560 columns): under 6 GB at 3 B parameters. A step waits for the
disk: it reads parameters twice, and once more with gradients and moments in the update, and writes all of that once.

Method. The model is built on the meta device, and its shards are made on NVMe one after another. Each step trains on
other text: the sources of Python's standard library. The peak is the process's own (VmHWM), with mapped pages. A model
that the disk has no room for is made smaller, and said so. ``--compare`` trains a small one in memory as well, and asks
for equal losses; both uncompiled.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

import psutil
import torch
from facts import describe, machine_facts

import zerograph

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, Config, init_weights
from text import batches, load

BYTES = 20  # on disk, of a parameter in float32: itself twice while it moves, its gradient, two moments
WIDTH, LENGTH = 2560, 128


def main() -> None:
    args = arguments()
    print(describe(machine_facts("cpu")))
    parameters = args.parameters
    room = int(shutil.disk_usage(args.directory).free * 0.9) // BYTES
    if room < parameters:
        print(
            f"the disk has room for {room / 1e9:.2f} B parameters, not {parameters / 1e9:.2f} B: that many are trained"
        )
        parameters = room
    width = WIDTH if parameters >= 5e8 else 512
    layers = max(1, parameters // (12 * width**2))
    config = Config(layers=layers, heads=width // 64, width=width, context=LENGTH)
    # In memory one process gathers nothing, so that its segments are others: Inductor then rounds in other places.
    compute = "eager" if args.compare else "inductor"
    if args.compare:
        torch.set_num_threads(1)  # two threads of torch's own operators differ in the last bit from run to run
    off = {"offload": "parameters", "tier": "nvme", "path": args.directory}
    losses = train(config, args.steps, args.batch, zerograph.backend(stage=3, compute=compute, **off))
    if args.compare:
        here = zerograph.backend(stage=3, compute=compute, dtype=torch.float32)
        assert losses == train(config, args.steps, args.batch, here), "losses differ from those in memory"
        print("losses are those in memory, to the bit")


def train(config: Config, steps: int, batch: int, backend: zerograph.Backend) -> list[float]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    begin = time.perf_counter()
    with torch.device("meta"):
        model = GPT(config)
    zerograph.shard(model, backend, device="cpu")
    zerograph.materialize(model, init=init_weights)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count / 1e9:.2f} B parameters made in {time.perf_counter() - begin:.0f} s, peak {peak():.2f} GB")
    model.compile(backend=backend)
    # The first steps of Adam move each weight by the whole rate, which deeper and wider models bear less of.
    optimizer = zerograph.optim.AdamW(model.parameters(), lr=min(1e-5, 3e3 / count))
    text, _ = load()
    losses = []
    for x, y in batches(text, steps, batch, LENGTH, seed=0):
        begin = time.perf_counter()
        loss = model(x, y)
        loss.backward()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        end = time.perf_counter()
        print(
            f"loss {losses[-1]:.4f}; forward and backward {middle - begin:.1f} s, update {end - middle:.1f} s; "
            f"peak {peak():.2f} GB",
            flush=True,
        )
    print(str(backend.report()).partition("  frame")[0])
    return losses


def peak() -> float:
    """GB that this process has had at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e9
    return psutil.Process().memory_info().rss / 1e9


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--parameters", type=lambda text: int(float(text)), default=3_000_000_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--compare", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
