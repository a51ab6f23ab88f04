"""Peak resident memory of one rank, beside what ZeRO promises.

    python benchmarks/memory.py                            # 2 gloo ranks, 12 layers, d=1024: 168 M parameters
    python benchmarks/memory.py --dtype bf16 --variants fsdp,zg3,zg3:bucket_size=16MiB
    python benchmarks/memory.py --layers 4 --batch 1 --seq 1024 4096 8192 --vocab 8192 32768 131072 \\
        --hidden 512 1024 2048                             # a step's peak against each

Prediction. Stage 3 peaks below DDP (3.9 GB measured before), `fully_shard` (2.5) and DeepSpeed ZeRO-3 (5.2), and each
stage within 10% of base + states / world size + gathered buckets + activations. Since gradients appear while
activations go, the sum is an upper bound: a good program stays a little below it.

Method. Each variant has fresh processes. "Base" is what a rank holds with torch, Inductor and its group loaded and no
model; "start" the peak from there to the end of the second step (the whole model, its sharding, compilation);
"steady" the peak of three more steps after the kernel forgot the first one (/proc/self/clear_refs). All are the
kernel's counts (VmHWM), of the largest rank. "Expected" is of the steady peak. Its parts: parameters, gradients and
Adam's two states, in fp32, each divided by the world size where the variant shards it; what is whole besides, in the
compute dtype (DDP's buckets, the two largest blocks in flight and the root of `fully_shard`, all of the model at
stages 1 and 2, `prefetch + 1` buckets at stage 3, and the unreduced gradients of a block or bucket); and what autograd
saves for the backward, counted on one and two layers and extrapolated.

With several values of --seq, --vocab or --hidden the peak of a step is measured against each: one of them takes its
values while the others stay at their first.

Prediction. At the largest value of each, ours with `recompute="full"` and the loss in 16 tiles has the lowest peak: of
one process stage 0 beside `torch.compile` with and without `torch.utils.checkpoint` around each block, of two ranks
stage 3, with weights or the layers' MLPs in tiles, beside `fully_shard` with and without. Beyond what stays between
steps it is at most half of the checkpointed variants' at the largest vocabulary and at most equal to it at the longest
sequence. What is not sharded has a gradient as large as its parameters in all variants, which at the largest width is
most of the peak.

Method. Each variant and size has fresh processes, one where nothing is sharded, else --world. The peak is of one step
after two others, of the rank that needs most, in bytes that torch's allocator has handed out, by torch's profiler:
parameters and optimizer states ("stays"), and what the step has beside them. So it holds no message buffers, no code
and nothing that malloc keeps free.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from crew import Crew, CrewFailed, runnable
from facts import append_json, describe, machine_facts, processes
from model import Workload, batches, build_model
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from variants import autocast, parse, title

OUT, ERR = Console(width=None if sys.stdout.isatty() else 140), Console(stderr=True)
DEFAULT = ["ddp", "ddp-compiled", "fsdp", "fsdp-compiled", "zg0", "zg1", "zg2", "zg3", "ds3"]
EAGER = ("eager", "ddp", "fsdp", "ds")
LEAST = "recompute=full:loss_tiles=16"
GROWING = [
    "compile", "checkpoint", "compile-checkpoint", f"zg0:{LEAST}", f"zg0:{LEAST}:token_tiles=8",
    "fsdp", "fsdp-checkpoint", f"zg3:{LEAST}:token_tiles=8", f"zg3:{LEAST}:tile=8:bucket_size=4MiB",
]  # fmt: skip
ALONE = ("eager", "compile", "checkpoint", "zg0")  # how the names of variants begin that shard nothing
MB = 1e6


@dataclass(frozen=True, slots=True)
class Expected:
    """Bytes of the parts of a rank's steady peak, without torch itself."""

    states: int
    unsharded: int
    activations: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes, of the largest rank."""

    base: int
    start: int
    steady: int
    between: int  # resident after a step
    buckets: tuple[int, ...]


def main() -> int:
    args = arguments()
    works = workloads(args)
    if any(len(found) > 1 for found in works.values()):
        return grow(args, works)
    return one(args, works["seq"][0])


def workloads(args: argparse.Namespace) -> dict[str, list[Workload]]:
    """By size that grows, the workloads with each of its values and the first of the others."""
    hidden, vocab, seq = args.hidden[0], args.vocab[0], args.seq[0]
    first = Workload(args.layers, hidden, args.heads, vocab, args.batch, seq, args.dtype, args.device)
    return {
        "seq": [replace(first, seq=value) for value in args.seq],
        "vocab": [replace(first, vocab=value) for value in args.vocab],
        "hidden": [replace(first, dim=value) for value in args.hidden],
    }


def grow(args: argparse.Namespace, works: dict[str, list[Workload]]) -> int:
    """The peak of a step against each size that has several values."""
    OUT.print(describe(facts := machine_facts(args.device)), soft_wrap=True)
    specs, skipped = runnable(args.variants or GROWING)
    found: dict[tuple[str, Workload], dict[str, int]] = {}
    for size, growing in works.items():
        if len(growing) == 1:
            continue
        for work in growing:
            for spec in specs:
                if (spec, work) in found:
                    continue
                with ERR.status(f"{title(spec)}: {work.describe()}"):
                    found[spec, work] = allocated(spec, work, args.world, args.timeout)
                if args.json:
                    record = {"benchmark": "memory, growing", "command": " ".join(sys.argv), "machine": facts}
                    record |= {"workload": asdict(work), "spec": spec, "world": args.world}
                    append_json(args.json, record | found[spec, work])
        show_growth(size, growing, specs, found)
    for spec, reason in skipped.items():
        OUT.print(f"{title(spec)}: skipped: {reason}", markup=False)
    return 0


def allocated(spec: str, work: Workload, world: int, timeout: float) -> dict[str, int]:
    """Bytes that the allocator handed out at the peak of a step, and of what stays between steps, of the largest rank;
    zeros where the variant fails."""
    world = 1 if spec.startswith(ALONE) else world
    try:
        with Crew(spec, work, world) as crew:
            for command in (("imports",), ("build",), ("steps", 2, 0)):
                crew.call(*command, timeout=timeout)
            return max(crew.call("allocated", timeout=timeout), key=lambda rank: rank["peak"])
    except CrewFailed as error:
        ERR.print(f"{title(spec)}: {error}\n{error.detail}", markup=False, soft_wrap=True)
        return {"peak": 0, "stays": 0}


def show_growth(
    size: str, growing: list[Workload], specs: list[str], found: dict[tuple[str, Workload], dict[str, int]]
) -> None:
    first, field_name = growing[0], "dim" if size == "hidden" else size
    table = Table(title=f"peak of a step in MB, and of it beyond what stays, against {size}; else {first.describe()}")
    table.add_column("variant")
    for work in growing:
        table.add_column(f"{size} {getattr(work, field_name)}", justify="right")
    for spec in specs:
        peaks = (found[spec, work] for work in growing)
        table.add_row(title(spec), *(f"{p['peak'] / MB:.0f} ({(p['peak'] - p['stays']) / MB:.0f})" for p in peaks))
    OUT.print(table)


def one(args: argparse.Namespace, work: Workload) -> int:
    """Resident memory at one size, beside what ZeRO promises."""
    OUT.print(f"{work.describe()}\n{describe(facts := machine_facts(args.device))}", soft_wrap=True)
    specs, skipped = runnable(args.variants or DEFAULT)
    saved = {compiled: activations(work, compiled) for compiled in (False, True)}
    found: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    for spec in specs:
        with ERR.status(title(spec)):
            try:
                found[spec] = measure(spec, work, args.world, args.timeout)
            except CrewFailed as error:
                failed[spec] = str(error)
                ERR.print(f"{title(spec)}: {error}\n{error.detail}", markup=False, soft_wrap=True)
    expected = {spec: expect(spec, work, args.world, saved, measured) for spec, measured in found.items()}
    show(found, expected, args.world)
    for spec, reason in {**{s: f"skipped: {r}" for s, r in skipped.items()}, **failed}.items():
        OUT.print(f"{title(spec)}: {reason}", markup=False)
    if args.json:
        results = {s: {"measured": asdict(m), "expected": asdict(expected[s])} for s, m in found.items()}
        append_json(args.json, {"benchmark": "memory", "command": " ".join(sys.argv), "machine": facts,
                                "workload": asdict(work), "world": args.world, "results": results})  # fmt: skip
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=12)
    add("--hidden", type=int, nargs="+", default=[1024])
    add("--heads", type=int, default=16)
    add("--batch", type=int, default=4, help="sequences per rank")
    add("--seq", type=int, nargs="+", default=[128])
    add("--vocab", type=int, nargs="+", default=[8192])
    add("--dtype", choices=["fp32", "bf16"], default="fp32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--world", type=int, help="ranks; default 2, on CUDA one for each GPU")
    add("--variants", type=known, help=f"by commas; {','.join(DEFAULT)}, or where sizes grow {','.join(GROWING)}")
    add("--timeout", type=float, default=1200)
    add("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    args.world = processes(parser, args.world, args.device)
    return args


def known(names: str) -> list[str]:
    specs = names.split(",")
    for spec in specs:
        parse(spec)
    return specs


def measure(spec: str, work: Workload, world: int, timeout: float) -> Measured:
    with Crew(spec, work, world) as crew:
        crew.call("imports", timeout=timeout)
        base = crew.call("memory")
        crew.call("build", timeout=timeout)
        crew.call("steps", 2, 0, timeout=timeout)
        start = crew.call("memory")
        if not all(crew.call("reset_peak")):
            ERR.print("the kernel does not let a process forget its peak: steady includes the start")
        crew.call("steps", 3, 0, timeout=timeout)
        steady = crew.call("memory")
        buckets = crew.call("buckets")[0]
    return Measured(
        largest(base, "rss"), largest(start, "peak"), largest(steady, "peak"), largest(steady, "rss"), tuple(buckets)
    )


def largest(ranks: list[dict[str, int]], key: str) -> int:
    return max(rank[key] for rank in ranks)


def expect(spec: str, work: Workload, world: int, saved: dict[bool, int], measured: Measured) -> Expected:
    name = spec.split(":")[0]
    compiled = name.startswith("zg") or name.endswith(("compiled", "compile", "inside"))
    states, unsharded = states_and_unsharded(name, parse(spec)[1], work, world, measured.buckets)
    return Expected(states, unsharded, saved[compiled])


def states_and_unsharded(
    name: str, options: dict[str, Any], work: Workload, world: int, buckets: tuple[int, ...]
) -> tuple[int, int]:
    """Bytes of (parameters + gradients + Adam's moments, what is gathered or not yet reduced)."""
    model = 4 * work.parameters
    low = work.compute_dtype.itemsize * work.parameters
    bucket = max(buckets, default=0)
    gradient = bucket * 4 // work.compute_dtype.itemsize  # of one bucket, as it is reduced
    match name:
        case "eager" | "compile":
            return 4 * model, 0
        case "ddp" | "ddp-compiled" | "ddp-inside":
            return 4 * model, model
        case "zg0":
            return 4 * model, gradient
        case "zg1":
            return 2 * model + 2 * model // world, low
        case "zg2":
            return model + 3 * model // world, low + gradient
        case "zg3":
            return 4 * model // world, (options.get("prefetch", 1) + 1) * bucket + gradient
        case _:
            block = 12 * work.dim**2 * work.compute_dtype.itemsize
            root = (2 * work.vocab + work.seq) * work.dim * work.compute_dtype.itemsize
            return 4 * model // world, 3 * block + root


def activations(work: Workload, compiled: bool) -> int:
    """Bytes saved for the backward by the model as it runs eagerly, or as Inductor's partitioner cuts it."""
    count = saved_by_partition if compiled else saved_by_autograd
    one, two = (count(replace(work, layers=layers, device="cpu")) for layers in (1, 2))
    return one + (two - one) * (work.layers - 1)


def saved_by_autograd(work: Workload) -> int:
    model = build_model(work)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = autocast(model, work)(*batches(work, 0)[0])
    del loss
    return sum(size for size, _ in saved.values())


def saved_by_partition(work: Workload) -> int:
    """Runs the partition that Inductor would compile, uncompiled, and adds up what its forward graph hands over."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    sizes: list[int] = []

    def forward(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        sizes.append(saved_bytes(graph))
        return graph.forward

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: graph.forward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    model = build_model(work)
    torch._dynamo.reset()
    model.compile(backend=backend)
    autocast(model, work)(*batches(work, 0)[0])
    return sizes[0]


def saved_bytes(graph: fx.GraphModule) -> int:
    """Bytes of a forward graph's outputs that are not views of its inputs, each storage once; the loss is 4 of them."""
    inputs = {storage(node) for node in graph.graph.find_nodes(op="placeholder")}
    outputs = (node for node in graph.graph.output_node().all_input_nodes if isinstance(node.meta["val"], Tensor))
    held = {storage(node): node.meta["val"].untyped_storage().nbytes() for node in outputs}
    return sum(size for key, size in held.items() if key not in inputs)


def storage(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else id(node)


def show(found: dict[str, Measured], expected: dict[str, Expected], world: int) -> None:
    table = Table(title=f"resident memory per rank in MB, {world} rank(s)")
    measurements, sums = ("start", "steady", "between"), ("= base", "+ states", "+ whole", "+ activations")
    for column in ("variant", *measurements, "expected", *sums, "steady / expected"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for spec, measured in found.items():
        parts = expected[spec]
        total = measured.base + parts.states + parts.unsharded + parts.activations
        sizes = (measured.start, measured.steady, measured.between, total,
                 measured.base, parts.states, parts.unsharded, parts.activations)  # fmt: skip
        table.add_row(title(spec), *(f"{size / MB:.0f}" for size in sizes), f"{measured.steady / total:.2f}")
    OUT.print(table)


if __name__ == "__main__":
    sys.exit(main())
