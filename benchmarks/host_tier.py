"""A GPT that one GPU computes and host memory holds, beside `fully_shard` with `CPUOffloadPolicy`.

    python benchmarks/host_tier.py [--layers 32] [--width 2560] [--batch 8] [--length 1024] [--steps 5] [--json FILE]

Prediction, for 2.6 B parameters on an H100 (a link of 50 GB/s, 16 cores that move 100 GB/s). The update passes over
28 bytes of each parameter, 0.7 s, and is the largest part of a step of both. `fully_shard` brings float32 parameters
to the device twice and float32 gradients back, 0.6 s, beside 0.3 s of products; ZeroGraph brings copies of bfloat16,
a third less. So a step takes 0.8 of `fully_shard`'s, and less where updates run inside of the backward.

Method. Compute is bfloat16 over parameters, gradients and moments of float32 on the host; blocks of `fully_shard` are
compiled, and its AdamW is torch's fused one. Each variant has a process of its own, one after another, with all cores
and the same tokens; weights are drawn by one rule and are not the same, so that losses are alike and not equal. The
first step compiles and the second warms up; shown is the median of the others, with the most memory that torch has had
on the device and the process on the host.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from crew import free_port
from facts import append_json, describe, machine_facts
from model import GPT, Workload, batches
from torch import nn

import zerograph

VARIANTS: dict[str, dict[str, Any]] = {
    "fully_shard": {},
    "zerograph": {"offload": "parameters"},
    "zerograph, overlap": {"offload": "parameters"},
    "zerograph, states": {"offload": "optimizer"},
}
LEARNING_RATE, WARM = 1e-5, 2


class Outcome(NamedTuple):
    """Seconds of each step and of its update, losses, and bytes at most."""

    steps: list[float]
    updates: list[float]
    losses: list[float]
    device: int
    host: int


def main() -> None:
    args = arguments()
    facts = machine_facts("cuda")
    print(describe(facts))
    sizes = {"layers": args.layers, "dim": args.width, "heads": args.width // 128, "vocab": 32768}
    work = Workload(**sizes, batch=args.batch, seq=args.length, dtype="bf16", device="cuda")
    print(work.describe())
    context, reference = multiprocessing.get_context("spawn"), None
    for name in args.variants.split(";"):
        with context.Pool(1) as pool:
            found: Outcome = pool.apply(train, (name, work, args.steps))
        step, update = (statistics.median(times[WARM:]) for times in (found.steps, found.updates))
        reference = reference or step
        print(
            f"{name:20} step {step:6.2f} s ({min(found.steps[WARM:]):.2f} to {max(found.steps[WARM:]):.2f}), "
            f"{step / reference:.2f}; update {update:.2f} s; first {found.steps[0]:.0f} s; "
            f"device {found.device / 1e9:.1f} GB, host {found.host / 1e9:.0f} GB; losses "
            + " ".join(f"{loss:.4f}" for loss in found.losses),
            flush=True,
        )
        if args.json:
            append_json(args.json, {"facts": facts, "variant": name, "work": asdict(work), **found._asdict()})


def train(name: str, work: Workload, count: int) -> Outcome:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = GPT(work)
    if name == "fully_shard":
        optimizer = shard_fully(model)
    else:
        backend = zerograph.backend(stage=3, tier="host", dtype=torch.bfloat16, **VARIANTS[name])
        zerograph.shard(model, backend, device="cuda")
        zerograph.materialize(model, init=init_weights)
        model.compile(backend=backend)
        own = {"overlap": True, "skip_nonfinite": False} if "overlap" in name else {}
        optimizer = zerograph.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **own)
    steps, updates, losses = [], [], []
    for tokens, targets in batches(work, 0, count):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - begin)
        updates.append(time.perf_counter() - middle)
        losses.append(loss.item())
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Outcome(steps, updates, losses, torch.cuda.max_memory_allocated(), host)


def shard_fully(model: Any) -> torch.optim.Optimizer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    dist.init_process_group("cpu:gloo,cuda:nccl")
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cuda", (1,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for block in model.blocks:
        block.compile()
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.apply(init_weights)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def init_weights(module: nn.Module) -> None:
    """Of GPTs: what a module makes itself, in either kind of parameter."""
    for name, parameter in module.named_parameters(recurse=False):
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if isinstance(module, nn.LayerNorm):
            local.fill_(float(name == "weight"))
        elif name == "weight":
            local.normal_(std=0.02)
        else:
            local.zero_()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--variants", default=";".join(VARIANTS), help="the first is what others are compared with")
    parser.add_argument("--json", type=Path, help="append the results to this JSON Lines file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: no CUDA device: host memory is a second one only beside a GPU's\n")
    return args


if __name__ == "__main__":
    main()
