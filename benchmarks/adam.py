"""AdamW on the CPU: the native kernels against torch, DeepSpeed and a bare pass over the same memory.

    python benchmarks/adam.py [--elements 100000000] [--repeats 15] [--json FILE]

All variants of a case work on the same tensors and run in turn, a round of each per repeat; shown are the median, the
quartiles, and the median of the ratios within a round. `stream` reads and writes what AdamW does, with one addition per
state: nothing that passes once over memory is faster. Cases:

fp32       parameters, gradients and moments of float32
offload    gradients of bfloat16 come in, a copy of bfloat16 goes out; torch and DeepSpeed need several passes for that
many       400 tensors of 10,000 elements
two ranks  half of the elements in each of two processes at once, on half of the cores each, against one with all
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from facts import Load, append_json, describe, machine_facts, version

import zerograph._core as _core
from zerograph._core import Algorithm, DType, Rule, TensorSet

RULE: dict[str, float] = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
BETAS = (0.9, 0.999)
Variants = dict[str, Callable[[], object]]


class Tensors:
    """What AdamW keeps for some parameters, shared by all variants."""

    def __init__(self, sizes: list[int], offload: bool = False) -> None:
        self.params = [torch.nn.Parameter(torch.randn(n)) for n in sizes]
        self.grads = [torch.rand(n) * 1e-3 for n in sizes]
        self.averages = [torch.zeros(n) for n in sizes]
        self.squares = [torch.zeros(n) for n in sizes]
        self.steps = [torch.zeros(()) for _ in sizes]
        self.narrow_grads = [grad.bfloat16() for grad in self.grads] if offload else []
        self.copies = [grad.clone() for grad in self.narrow_grads]

    def ours(self) -> Callable[[], object]:
        rule = Rule(Algorithm.adam, beta1=BETAS[0], beta2=BETAS[1], decoupled=True, **RULE)
        tensors = TensorSet(
            [(p.data_ptr(), DType.float32, p.numel()) for p in self.params],
            [[s.data_ptr() for s in slot] for slot in (self.averages, self.squares)],
            DType.float32,
            [c.data_ptr() for c in self.copies],
            DType.bfloat16,
            [s.data_ptr() for s in self.steps],
        )
        dtype = DType.bfloat16 if self.narrow_grads else DType.float32

        def step() -> None:
            grads = [grad.data_ptr() for grad in self.narrow_grads or self.grads]
            _core.update([(rule, tensors, grads, dtype, [])]).wait()

        return step

    def stream(self) -> Callable[[], object]:
        (param,), (average,), (square,) = self.params, self.averages, self.squares
        dtype = DType.bfloat16 if self.narrow_grads else DType.float32

        def step() -> None:
            grad = (self.narrow_grads or self.grads)[0].data_ptr()
            copy = self.copies[0].data_ptr() if self.copies else 0
            _core.stream(param.data_ptr(), grad, dtype, average.data_ptr(), square.data_ptr(), copy, param.numel())

        return step

    def with_casts(self, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        """A step of an optimizer that knows float32 only, and for the offload case the casts around it."""
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad
        for param, average, square in zip(self.params, self.averages, self.squares, strict=True):
            optimizer.state[param] = {"step": torch.zeros(()), "exp_avg": average, "exp_avg_sq": square}

        def step() -> None:
            for grad, narrow in zip(self.grads, self.narrow_grads, strict=bool(self.narrow_grads)):
                grad.copy_(narrow)
            optimizer.step()
            for copy, param in zip(self.copies, self.params, strict=bool(self.copies)):
                copy.copy_(param.detach())

        return step

    def torch(self, **how: bool) -> Callable[[], object]:
        return self.with_casts(torch.optim.AdamW(self.params, betas=BETAS, **RULE, **how))

    def deepspeed(self) -> Variants:
        """Nothing where DeepSpeed is not installed, which the report says; one that cannot be built is an error."""
        if version("deepspeed") is None:
            return {}
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # compiles its kernels when it is first used

        optimizer = DeepSpeedCPUAdam(self.params, betas=BETAS, adamw_mode=True, **RULE)
        step = self.with_casts(optimizer)
        for state in optimizer.state.values():
            state["step"] = 0
        return {"DeepSpeed": step}


def cases(elements: int) -> dict[str, Callable[[], Variants]]:
    def fp32() -> Variants:
        tensors = Tensors([elements])
        return {
            "zerograph": tensors.ours(),
            "stream": tensors.stream(),
            "torch fused": tensors.torch(fused=True),
            **tensors.deepspeed(),
        }

    def offload() -> Variants:
        tensors = Tensors([elements], offload=True)
        return {
            "zerograph": tensors.ours(),
            "stream": tensors.stream(),
            "torch fused": tensors.torch(fused=True),
            **tensors.deepspeed(),
        }

    def many() -> Variants:
        tensors = Tensors([10_000] * 400)
        return {
            "zerograph": tensors.ours(),
            "torch foreach": tensors.torch(foreach=True),
            "torch fused": tensors.torch(fused=True),
            **tensors.deepspeed(),
        }

    return {"fp32": fp32, "offload": offload, "many": many}


def measure(variants: Variants, repeats: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 2):
        for name, call in variants.items():
            begin = time.perf_counter()
            call()
            if repeat >= 2:
                samples[name].append(time.perf_counter() - begin)
    return samples


def rank_worker(rank: int, ranks: int, elements: int, repeats: int, gate: Any, results: Any) -> None:
    """Steps when the gate lets everyone through; the parent says whose turn it is by two gates per round."""
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    tensors = Tensors([elements // ranks])
    step = tensors.ours()  # which does not hold on to the parameters
    for _ in range(repeats + 2):
        gate.wait()
        begin = time.perf_counter()
        step()
        results.put(time.perf_counter() - begin)


def two_ranks(elements: int, repeats: int) -> dict[str, list[float]]:
    """The slower of the two counts. Whoever is not measured sleeps."""
    context = mp.get_context("spawn")
    crews = {}
    for name, ranks in {"one rank": 1, "two ranks": 2}.items():
        gate, results = context.Barrier(ranks + 1), context.Queue()
        crew = [
            context.Process(target=rank_worker, args=(rank, ranks, elements, repeats, gate, results), daemon=True)
            for rank in range(ranks)
        ]
        for process in crew:
            process.start()
        crews[name] = gate, results, crew
    samples: dict[str, list[float]] = {name: [] for name in crews}
    for repeat in range(repeats + 2):
        for name, (gate, results, crew) in crews.items():
            gate.wait()
            seconds = max(results.get(timeout=120) for _ in crew)
            if repeat >= 2:
                samples[name].append(seconds)
    for *_, crew in crews.values():
        for process in crew:
            process.join()
    return samples


def report(case: str, samples: dict[str, list[float]], elements: int) -> None:
    first, *_ = samples
    print(f"\n{case}: {elements:,} elements")
    for name, times in samples.items():
        low, median, high = statistics.quantiles(times, n=4)
        ratio = statistics.median(a / b for a, b in zip(times, samples[first], strict=True))
        print(f"  {name:14}{median * 1e3:10.2f} ms  ({low * 1e3:.2f} to {high * 1e3:.2f}){ratio:8.2f}x {first}'s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=100_000_000, help="16 bytes each, 20 in the offload case")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="a line for each case goes here")
    args = parser.parse_args()
    facts = machine_facts("cpu")
    print(f"{describe(facts)}; kernels {_core.simd_target()}, {_core.pool_threads()} threads")
    if version("deepspeed") is None:
        print("DeepSpeed is not installed: not compared with")
    torch.set_num_threads(_core.pool_threads())
    runs: dict[str, Callable[[], dict[str, list[float]]]] = {
        name: (lambda build=build: measure(build(), args.repeats)) for name, build in cases(args.elements).items()
    }
    runs["two ranks"] = lambda: two_ranks(args.elements, args.repeats)
    load, process = Load(), psutil.Process()
    for name, run in runs.items():
        load.start()
        before = sum(process.cpu_times()[:4])
        samples = run()
        load.stop(sum(process.cpu_times()[:4]) - before)
        elements = 4_000_000 if name == "many" else args.elements
        report(name, samples, elements)
        if args.json:
            append_json(args.json, {"case": name, "elements": elements, "samples": samples, "facts": facts})
    print(f"\nother processes took {load.share:.0%} of the processor meanwhile")


if __name__ == "__main__":
    main()
