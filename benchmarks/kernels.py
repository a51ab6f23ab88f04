"""The Triton kernels on a GPU: AdamW, norms, messages and wires, against torch.

    python benchmarks/kernels.py [--elements 250000000] [--repeats 30] [--json FILE]

All variants of a case run in turn, a round of each per repeat; shown are the median, the quartiles, and the median of
the ratios within a round, of the time on the device: events around a call that was submitted while the device was busy
with something else, so that nothing of the host is in it. "host" is the median time that the call takes to submit. In
training the device is behind the host, and hides it. Cases:

copy       a tensor is copied: the bytes per second that the others are compared with
fp32       AdamW of float32 parameters, gradients and moments, 28 bytes for each element; asked: 0.9 of a copy's rate
bf16       gradients of bfloat16 come in, a copy of bfloat16 goes out: 28 bytes for each element; asked: the same
many       AdamW of 400 tensors of 10,000 elements; asked: a third of foreach's time
norm       sum of squares of float32: 4 bytes for each element
message    float32 shards become a message of bfloat16: 6 bytes for each element
encode     float32 as fp8, int8 and int4 are written: 5.02 bytes for each element, and 4.52
decode     the same is read: as many
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from facts import append_json, describe, machine_facts, version

Variants = dict[str, Callable[[], object]]
BUSY = 30_000_000  # cycles that the device sleeps before a call, longer than any of them takes to submit


class Case(NamedTuple):
    """Variants that are compared, and the bytes that each moves at least; 0 where that says nothing."""

    variants: Variants
    bytes: int = 0


def copied(elements: int) -> Case:
    source = torch.randn(elements, device="cuda")
    target = torch.empty_like(source)
    return Case({"copy": lambda: target.copy_(source)}, 8 * elements)


def updated(sizes: list[int], low: bool, others: Callable[[list[torch.nn.Parameter]], Variants]) -> Case:
    from zerograph.runtime.kernels import adamw

    params = [torch.nn.Parameter(torch.randn(n, device="cuda")) for n in sizes]
    for p in params:
        p.grad = torch.rand_like(p) * 1e-3
    tensors = adamw.Tensors(
        [p.detach() for p in params],
        [p.grad.bfloat16() if low else p.grad for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params],
        [torch.zeros((), device="cuda") for _ in params],
        copies=[p.detach().bfloat16() for p in params] if low else [],
    )
    rule = adamw.Rule(1e-4, 0.9, 0.999, 1e-8, 0.01, decoupled=True)
    return Case({"zerograph": lambda: adamw.update(tensors, rule), **others(params)}, 28 * sum(sizes))


def torchs(params: list[torch.nn.Parameter]) -> Variants:
    made = {f"torch {how}": torch.optim.AdamW(params, lr=1e-4, **{how: True}) for how in ("foreach", "fused")}
    return {name: optimizer.step for name, optimizer in made.items()}


def torch_fused(params: list[torch.nn.Parameter]) -> Variants:
    return {"torch fused": torch.optim.AdamW(params, lr=1e-4, fused=True).step}


def summed(elements: int) -> Case:
    from zerograph.runtime.kernels.sum_of_squares import sum_of_squares

    tensors = [torch.randn(elements // 8, device="cuda") for _ in range(8)]
    variants: Variants = {
        "zerograph": lambda: sum_of_squares(tensors),
        "torch foreach": lambda: torch.stack(torch._foreach_norm(tensors)).square().sum(),
    }
    return Case(variants, 4 * elements)


def packed(elements: int) -> Case:
    from zerograph.runtime.kernels.messages import pack

    shards = [torch.randn(elements // 8, device="cuda") for _ in range(8)]
    length = elements // 8
    message = torch.empty(1, 8 * length, device="cuda", dtype=torch.bfloat16)

    def by_torch() -> None:
        message.zero_()
        for i, shard in enumerate(shards):
            message[0, i * length : (i + 1) * length] = shard

    offsets = [i * length for i in range(8)]
    variants: Variants = {
        "zerograph": lambda: pack(shards, [length] * 8, offsets, message),
        "torch": by_torch,
    }
    return Case(variants, 6 * elements)


def wired(wire: str, elements: int, decodes: bool) -> Case:
    from zerograph.core.step import wire_bytes
    from zerograph.runtime.comm.wires import decode_by_torch, encode_by_torch
    from zerograph.runtime.kernels import wires

    values = torch.randn(1, elements, device="cuda")
    message = torch.empty(1, wire_bytes(wire, elements), device="cuda", dtype=torch.uint8)
    wires.encode(wire, values, message)
    variants: Variants = {
        "zerograph": lambda: wires.encode(wire, values, message),
        "torch": lambda: encode_by_torch(wire, values, message),
    }
    if decodes:
        variants = {
            "zerograph": lambda: wires.decode(wire, message, values),
            "torch": lambda: decode_by_torch(wire, message, values),
        }
    return Case(variants, 4 * elements + message.numel())


class Measured(NamedTuple):
    """Seconds of each run of one variant on the device and to submit it, and bytes that it allocates at most."""

    device: list[float]
    host: list[float]
    peak: int


def measure(variants: Variants, repeats: int) -> dict[str, Measured]:
    found = {name: Measured([], [], 0) for name in variants}
    for repeat in range(repeats + 3):
        for name, call in variants.items():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, marks = torch.cuda.memory_allocated(), [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(BUSY)
            marks[0].record()
            begin = time.perf_counter()
            call()
            host = time.perf_counter() - begin
            marks[1].record()
            torch.cuda.synchronize()
            if repeat >= 3:
                found[name].device.append(marks[0].elapsed_time(marks[1]) / 1e3)
                found[name].host.append(host)
                found[name] = found[name]._replace(peak=torch.cuda.max_memory_allocated() - before)
    return found


def report(name: str, case: Case, found: dict[str, Measured], copy: float) -> float:
    """Prints a case; returns bytes per second of its first variant."""
    first, *_ = found
    print(f"\n{name}")
    rate = 0.0
    for variant, (times, host, peak) in found.items():
        low, median, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, found[first].device, strict=True))
        line = f"  {variant:14}{median * 1e3:10.3f} ms  ({low * 1e3:.3f} to {high * 1e3:.3f}){ratio:8.2f}x {first}'s"
        line += f", host {statistics.median(host) * 1e3:.3f} ms, {peak / 2**20:.0f} MiB more"
        if case.bytes:
            line += f", {case.bytes / median / 1e9:.0f} GB/s"
            line += f" ({case.bytes / median / copy:.2f} of a copy's)" if copy else ""
        print(line)
        rate = rate or case.bytes / median
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=250_000_000, help="of the large cases: 20 bytes each at most")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="a line for each case goes here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(
            2, "error: no CUDA device: these kernels run on a GPU only\n\nhint: benchmarks/adam.py is the CPU's\n"
        )
    if version("triton") is None:
        parser.exit(2, "error: Triton is not installed\n\nhint: pip install triton\n")
    facts = machine_facts("cuda")
    print(describe(facts))
    cases: dict[str, Callable[[], Case]] = {
        "copy": lambda: copied(args.elements),
        "fp32": lambda: updated([args.elements], False, torch_fused),
        "bf16": lambda: updated([args.elements], True, lambda params: {}),
        "many": lambda: updated([10_000] * 400, False, torchs),
        "norm": lambda: summed(args.elements),
        "message": lambda: packed(args.elements),
    }
    for wire in ("fp8", "int8", "int4"):  # of a quarter of them: torch's operators make copies of all
        cases[f"encode {wire}"] = functools.partial(wired, wire, args.elements // 4, False)
        cases[f"decode {wire}"] = functools.partial(wired, wire, args.elements // 4, True)
    copy = 0.0
    for name, build in cases.items():
        case = build()
        found = measure(case.variants, args.repeats)
        rate = report(name, case, found, copy)
        copy = copy or rate
        if args.json:
            append_json(
                args.json, {"case": name, "facts": facts, **{key: each._asdict() for key, each in found.items()}}
            )
        del case
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
