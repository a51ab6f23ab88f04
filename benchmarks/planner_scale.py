"""What it costs to plan a huge model on a small machine: seconds, bytes of the plan file, and memory.

    python benchmarks/planner_scale.py                       # 8, 32 and 128 layers (1 T parameters) for 1024 ranks
    python benchmarks/planner_scale.py --layers 8,16 --hidden 4096 --world 64
    python benchmarks/planner_scale.py --layers 32 --whole   # every layer traced

Targets, for 128 layers of hidden size 25600 on 2 cores: capture in 60 s, planning in 5 s, a plan file of 2 MB, 4 GiB.

Method. Every case has a fresh process, which imports first. "capture" is everything from building the model on the meta
device to its programs: tracing by Dynamo and AOTAutograd, partitioning, our passes and lowering. "ours" is that part of
it which is not torch's: passes, capture of the step, lowering. "planning" is the planner alone, run once more on the
captured step; "search" what `--stage auto --offload auto` looks for over all tiers, in CPU seconds; "forecast" the
simulation of the programs. Wall seconds and, for capture, CPU seconds of the process, which other load disturbs less.
Memory is the peak of the resident set, torch's own 0.4 GiB included.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing as mp
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from facts import append_json, describe, machine_facts
from rich.console import Console

VOCAB, SEQ = 51200, 1024
TARGETS = {"capture": 60.0, "planning": 5.0, "megabytes": 2.0, "gibibytes": 4.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of planning one model; seconds, 10**6 bytes and 2**30 bytes."""

    layers: int
    parameters: int
    capture: float
    capture_cpu: float
    ours_cpu: float
    planning: float
    search_cpu: float
    forecast: float
    megabytes: float
    gibibytes: float

    def __str__(self) -> str:
        return (
            f"{self.layers} layers, {self.parameters / 1e9:.3g} B parameters: capture {self.capture:.1f} s "
            f"({self.capture_cpu:.1f} s of CPU, {self.ours_cpu:.1f} of them ours), planning {self.planning:.3f} s, "
            f"search {self.search_cpu:.1f} s of CPU, forecast {self.forecast:.3f} s, "
            f"plan file {self.megabytes:.2f} MB, memory {self.gibibytes:.2f} GiB"
        )


def main() -> None:
    args = arguments()
    console = Console(highlight=False)
    console.print(describe(facts := machine_facts("cpu")), soft_wrap=True)
    context = mp.get_context("spawn")
    for layers in args.layers:
        with ProcessPoolExecutor(1, mp_context=context) as fresh:
            cost = fresh.submit(measure, layers, args.hidden, args.world, not args.whole).result()
        missed = [name for name, most in TARGETS.items() if getattr(cost, name) > most]
        console.print(f"{cost}\n  {'missed: ' + ', '.join(missed) if missed else 'within all targets'}", soft_wrap=True)
        if args.json:
            append_json(
                args.json,
                {"benchmark": "planner_scale", **asdict(cost), "world": args.world, "whole": args.whole, **facts},
            )


def measure(layers: int, hidden: int, world: int, repeat_layers: bool) -> Cost:
    import torch
    from model import GPT, Workload

    from zerograph.compiler import driver, rewrite
    from zerograph.core.machine import machine_named
    from zerograph.dryrun.compile_only import compile_only
    from zerograph.dryrun.forecast import forecast_file
    from zerograph.planner.estimate.estimate import RESERVE
    from zerograph.planner.programs.rules import plan_step
    from zerograph.planner.search.constraints import Constraints
    from zerograph.planner.search.search import Search

    work = Workload(layers=layers, dim=hidden, heads=hidden // 128, vocab=VOCAB, batch=1, seq=SEQ)

    def make() -> tuple[torch.nn.Module, tuple[Any, Any]]:
        tokens = torch.zeros(1, SEQ, dtype=torch.int64)
        return GPT(work), (tokens, tokens)

    ours = Clock()
    for name in ("capture", "lower"):
        setattr(driver, name, ours.counting(getattr(driver, name)))
    rewrite.PIPELINE = tuple(step._replace(run=ours.counting(step.run)) for step in rewrite.PIPELINE)
    begin, cpu = time.perf_counter(), time.process_time()
    compiled = compile_only(make, world_size=world, repeat_layers=repeat_layers)
    capture, capture_cpu = time.perf_counter() - begin, time.process_time() - cpu

    step = compiled.frame.step
    begin = time.perf_counter()
    plan_step(step, stage=3, world_size=world, bucket_size=32 * 2**20, prefetch=1)
    planning = time.perf_counter() - begin

    machine, cpu = machine_named("v100-32gb-dgx2"), time.process_time()
    search = Search(step, Constraints("auto", world, offload="auto"), machine)
    if search.within(machine.budget(world, RESERVE)) is None:
        raise SystemExit(f"no plan of {layers} layers fits")
    search_cpu = time.process_time() - cpu

    begin = time.perf_counter()
    file = forecast_file("gpt", compiled, machine)
    forecast = time.perf_counter() - begin
    return Cost(
        layers,
        work.parameters,
        capture,
        capture_cpu,
        ours.seconds,
        planning,
        search_cpu,
        forecast,
        len(file.to_json()) / 1e6,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )


class Clock:
    """CPU seconds inside of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begin

        return timed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=lambda text: [int(n) for n in text.split(",")], default=[8, 32, 128])
    parser.add_argument("--hidden", type=int, default=25600)
    parser.add_argument("--world", type=int, default=1024)
    parser.add_argument("--whole", action="store_true", help="trace every layer, instead of a few that are repeated")
    parser.add_argument("--json", type=Path, help="append results to this JSON Lines file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
