"""Losses and bytes of the demo's GPT under AdamW, and under OneBitAdam with 23% of its steps before the freeze.

    python benchmarks/onebit_adam.py                 # 2 hosts of a rank each, 300 steps: 5 minutes on two cores
    python benchmarks/onebit_adam.py --stage 1 --rate 200mbit

Prediction. A frozen step sends 1.125 bits of an element for 32, once to the rank that averages it and once back: 1/28
of the bytes of an all-reduce. The steps before it send all of theirs, so a run with 23% of these sends
0.23 + 0.77/28 = 0.26 of the bytes of AdamW, and no format of momenta sends less than 0.23. With `reduce_wire="bf16"`,
which halves the gradients of the steps before the freeze, it is 0.14. The mean loss of the last hundred of 300 steps
is within 1% of AdamW's. At stage 1 parameters are gathered in each step as before, and the ratio is above 0.6.

Method. Hosts are network namespaces of this machine (`namespaces.py`, which takes root and `iproute2`). Bytes are those
that the first host sends from before the first step to the end of the last one. Seeds, batches and learning rates are
the same for all; nothing is clipped, as OneBitAdam does not after the freeze. In 69 steps a variance that decays by
0.999 still has the large gradients of the first ones, and is frozen with these: it decays by 0.95, as that of language
models often does. Held-out loss is of text that no run has seen.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from facts import append_json, describe, machine_facts
from namespaces import Host, Hosts
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

VARIANTS = [("AdamW", None), ("OneBitAdam", "bf16"), ("OneBitAdam", None), ("AdamW", "bf16")]
"""The optimizer, and the backend's `reduce_wire`."""
OUT = Console(width=None if sys.stdout.isatty() else 120)


class Found(NamedTuple):
    """Of one run.

    Attributes:
        loss: of training, the mean of the last hundred steps over all ranks.
        held_out: of text that was not trained on.
        sent: bytes of the first host.
        seconds: of a step, the mean of those after the freeze.
    """

    loss: float
    held_out: float
    sent: int
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--warmup", type=float, default=0.23, help="share of the steps before the freeze")
    parser.add_argument("--beta2", type=float, default=0.95, help="the decay of the variance, of both optimizers")
    parser.add_argument("--rate", default="1gbit", help="at which a host sends, as tc takes it")
    parser.add_argument("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    args.freeze = round(args.warmup * args.steps)
    facts = machine_facts("cpu")
    OUT.print(f"GPT of examples/01_first_run.py, 2 hosts, {args.steps} steps, {args.freeze} of them before the freeze")
    OUT.print(f"stage {args.stage}, {args.rate}, betas 0.9 and {args.beta2}; {describe(facts)}")
    found: dict[str, Found] = {}
    for optimizer, wire in VARIANTS:
        own = found[f"{optimizer}/{wire}"] = run(optimizer, wire, args)
        first = found["AdamW/None"]
        OUT.print(
            f"{optimizer} reduce_wire={wire}: training loss {own.loss:.4f}, {own.loss / first.loss:.4f} of the first; "
            f"held-out {own.held_out:.4f}, {own.held_out / first.held_out:.4f}; sent {own.sent / 1e6:.1f} MB, "
            f"{own.sent / first.sent:.4f}; {own.seconds * 1e3:.0f} ms a step after the freeze"
        )
    if args.json:
        given = {name: getattr(args, name) for name in ("steps", "stage", "warmup", "beta2", "rate")}
        append_json(args.json, {**given, **facts, "variants": {k: v._asdict() for k, v in found.items()}})
    return 0


def run(optimizer: str, wire: str | None, args: argparse.Namespace) -> Found:
    queue = mp.get_context("spawn").SimpleQueue()
    with Hosts(2, args.rate) as hosts:
        given: dict[str, Any] = {"stage": args.stage, "reduce_wire": wire}
        mp.spawn(train, (hosts, optimizer, given, args.beta2, args.steps, args.freeze, queue), 2)
        return queue.get()


def train(
    rank: int,
    hosts: list[Host],
    kind: str,
    options: dict[str, Any],
    beta2: float,
    steps: int,
    freeze: int,
    queue: mp.SimpleQueue,
) -> None:
    from gpt import GPT, Config, evaluate
    from text import batches, load

    import zerograph

    hosts[rank].enter()
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{hosts[0].address}:29593", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = GPT(Config())
    model.compile(backend=zerograph.backend(**options))
    own = {"freeze_step": freeze} if kind == "OneBitAdam" else {}
    make = getattr(zerograph.optim, kind)
    optimizer = make(model.parameters(), lr=3e-3, betas=(0.9, beta2), weight_decay=0.0, **own)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 40))
    text, held_out = load()
    total, begun = torch.zeros(()), 0.0
    for number, (x, y) in enumerate(batches(text, steps, 8, model.config.context, seed=rank)):
        if number == freeze + 1:
            begun = time.perf_counter()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.detach() * (number >= steps - 100)
    seconds = (time.perf_counter() - begun) / (steps - freeze - 1)
    dist.barrier()
    sent = int(Path("/proc/self/net/dev").read_text().partition("eth0:")[2].split()[8])
    dist.all_reduce(total)
    model.eval()
    held = evaluate(model, held_out)
    if rank == 0:
        queue.put(Found(total.item() / 2 / min(100, steps), held, sent, seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
