"""Losses of the demo's GPT whose gathers and reductions travel in fewer bits, beside those without.

    python benchmarks/wires.py                 # 2 ranks, 300 steps, each wire: 8 minutes on two cores

Prediction. Int8 and fp8 gathers compute with weights that are off by 0.4% and 3% of the largest of a block at most, and
int4 reductions with gradients that are off by 7%: rounding that is without bias over blocks and steps. The mean loss of
the last hundred of 300 steps is within 1% of that without.

Method. Ranks keep to the process group, so that each one's gradients are sent in fewer bits and not sums of a host.
Seeds, batches and learning rates are the same for all; held-out loss is of text that no run has seen.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from facts import append_json, describe, machine_facts
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

WIRES = [(None, None), ("bf16", "bf16"), ("fp8", "int8"), ("int8", "int8"), ("int8", "int4")]
OUT = Console(width=None if sys.stdout.isatty() else 120)
Losses = tuple[float, float]
"""Of training, the mean of the last hundred steps over all ranks, and of held-out text."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    facts = machine_facts("cpu")
    OUT.print(f"GPT of examples/01_first_run.py, {args.ranks} ranks, {args.steps} steps, stage {args.stage}")
    OUT.print(describe(facts))
    found: dict[str, Losses] = {}
    for wires in WIRES:
        trained, held_out = found[f"{wires[0]}/{wires[1]}"] = losses(*wires, args)
        first = found["None/None"]
        OUT.print(
            f"gather_wire={wires[0]} reduce_wire={wires[1]}: training loss {trained:.4f}, "
            f"{trained / first[0]:.4f} of that without; held-out {held_out:.4f}, {held_out / first[1]:.4f}"
        )
    if args.json:
        append_json(args.json, {"ranks": args.ranks, "steps": args.steps, "stage": args.stage, **facts, "wires": found})
    return 0


def losses(gather: str | None, reduce: str | None, args: argparse.Namespace) -> Losses:
    queue = mp.get_context("spawn").SimpleQueue()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591", "ZEROGRAPH_TRANSPORT": "group"}
    mp.spawn(train, (gather, reduce, args.ranks, args.steps, args.stage, queue), args.ranks)
    return queue.get()


def train(
    rank: int, gather: str | None, reduce: str | None, world: int, steps: int, stage: int, queue: mp.Queue
) -> None:
    from gpt import GPT, Config, evaluate
    from text import batches, load

    import zerograph

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = GPT(Config())
    model.compile(backend=zerograph.backend(stage=stage, gather_wire=gather, reduce_wire=reduce))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    text, held_out = load()
    total = torch.zeros(())
    for number, (x, y) in enumerate(batches(text, steps, 8, model.config.context, seed=rank)):
        loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        total += loss.detach() * (number >= steps - 100)
    dist.all_reduce(total)
    model.eval()
    found = evaluate(model, held_out)
    if rank == 0:
        queue.put((total.item() / world / min(100, steps), found))
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
