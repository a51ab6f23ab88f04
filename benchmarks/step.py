"""Time of a training step (forward, backward, AdamW, zero_grad) of zerograph's stages beside every alternative.

    python benchmarks/step.py                                   # 2 gloo ranks, 1 thread each, 6 layers, d=512, fp32
    python benchmarks/step.py --layers 12 --dtype bf16
    python benchmarks/step.py --world 1                         # beside plain torch.compile, no process group
    python benchmarks/step.py --variants ddp,fsdp,zg3,zg3:bucket_size=8MiB:prefetch=2 --rounds 9
    python benchmarks/step.py --device cuda --dim 2048 --heads 16 --batch 8 --seq 1024 --dtype bf16

Prediction. On two CPU ranks the step is bound by matrix products (9 tenths of the fp32 step) and by gloo, which here
moves about 1 GB/s: stage 3 takes at most 0.80 of the time of the fastest `fully_shard`, stages 1 and 2 at most that of
compiled DDP, stage 0 that of compiled DDP; in bf16 the gaps widen, because the products shrink and overhead stays. At
world size 1 every stage is within 2% of plain `torch.compile`.

Method. Each variant has its own processes, of which only one crew runs at a time. In each round every variant does one
warm-up step and `--steps` timed ones, the order rotating from round to round; a step takes as long as its slowest
rank. A round gives one median per variant, and ratios are taken within a round, so that slow drifts of the machine
cancel; the table shows the median of the ratios and their quartiles. The first steps' losses and gradient norms are
compared with eager DDP's (at world size 1: eager's). "CPU" is a rank's CPU time per step and "least" the fastest round:
both move less than the median when other processes run; `--patience` repeats a burst that was disturbed. When the
variants do not fit in memory together they run in waves, each with the references that the ratios need.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from crew import BARE, Crew, CrewFailed, runnable
from facts import Load, append_json, describe, machine_facts, processes
from model import Workload
from rich.console import Console
from rich.table import Table
from variants import parse, title

OUT, ERR = Console(width=None if sys.stdout.isatty() else 160), Console(stderr=True)
STAGES = [f"zg{n}" for n in range(4)]
ALONE = ["eager", "compile", *STAGES]
TOGETHER = ["ddp", "ddp-compiled", "fsdp", "fsdp-compiled", *STAGES, "ds1", "ds2", "ds3"]
ANCHORS = ("eager", "compile", "ddp", "ddp-compiled", "fsdp", "fsdp-compiled")  # what ratios are taken to
FULLY_SHARD = "best fully_shard"
CHECKED_STEPS = 4
PIECE = 16 * 2**20  # bytes per bare collective
TOLERANCE = {"fp32": (2e-4, 1e-3), "bf16": (3e-2, 5e-2)}  # absolute of the loss, relative of the gradient's norm
ALIKE = {"cpu": 0.0, "cuda": 1e-5}  # how far losses of stages 1 to 3 may be from each other
QUIET = 0.05  # the share of the machine others may take before the result is called noisy


@dataclass(slots=True)
class Result:
    """What is known of one variant. Times are seconds; `rounds` holds one median step per round."""

    spec: str
    status: str = "ok"
    detail: str = ""
    first: list[tuple[float, float]] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)
    phases: list[tuple[float, ...]] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    mismatch: str = ""
    report: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds) if self.rounds else math.nan

    def phase(self, index: int) -> float:
        return statistics.median(p[index] for p in self.phases) if self.phases else math.nan

    def fail(self, error: CrewFailed) -> None:
        self.status, self.detail = f"failed: {error}", error.detail


def main() -> int:
    args = arguments()
    work = Workload(args.layers, args.dim, args.heads, 8192, args.batch, args.seq, args.dtype, args.device)
    try:
        specs, skipped = runnable(chosen(args))
    except ValueError as error:
        ERR.print(f"[red]error:[/] {error}")
        return 2
    facts, load = machine_facts(args.device), Load()
    OUT.print(f"{work.describe()}\n{args.world} rank(s), 1 thread each; {describe(facts)}", soft_wrap=True)
    results: dict[str, Result] = {}
    for wave in waves(specs, alive_at_once(args, work)):
        for result in run_wave(wave, work, args, load):
            results.setdefault(result.spec, result)
    compare_losses(results, reference(args.world), args.dtype, args.device)
    bare = bare_collectives(work, args) if args.world > 1 else {}
    show(results, skipped, args, load)
    show_collectives(bare, work)
    if args.json:
        append_json(args.json, record(work, args, facts, load, results, skipped, bare))
    return 1 if any(r.status != "ok" or r.mismatch for r in results.values()) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=512)
    add("--heads", type=int, default=8)
    add("--batch", type=int, default=4, help="sequences per rank")
    add("--seq", type=int, default=128)
    add("--dtype", choices=["fp32", "bf16"], default="fp32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--world", type=int, help="ranks; default 2, on CUDA one for each GPU")
    add("--variants", help=f"comma-separated; default {','.join(TOGETHER)} or, alone, {','.join(ALONE)}")
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=3, help="timed steps per variant and round")
    add("--patience", type=float, default=0, help="seconds to go on trying for a burst that nothing else disturbs")
    add("--alive", type=int, help="variants in memory at once; default: as many as fit")
    add("--timeout", type=float, default=600, help="seconds a command may take before its variant counts as hung")
    add("--report", action="store_true", help="print what zerograph's backends report")
    add("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    args.world = processes(parser, args.world, args.device)
    return args


def chosen(args: argparse.Namespace) -> list[str]:
    """The specs to run, the reference always among them. ValueError for an unknown one."""
    default = ALONE if args.world == 1 else TOGETHER
    specs = args.variants.split(",") if args.variants else default
    for spec in specs:
        parse(spec)
    return list(dict.fromkeys([reference(args.world), *specs]))


def reference(world: int) -> str:
    return "eager" if world == 1 else "ddp"


def alive_at_once(args: argparse.Namespace, work: Workload) -> int:
    """How many variants fit in four fifths of the free memory, at 5 fp32 copies of the model and torch itself each."""
    if args.alive or args.device == "cuda":
        return args.alive or 1000
    per_rank = 20 * work.parameters + 700 * 2**20
    return int(0.8 * psutil.virtual_memory().available) // (args.world * per_rank)


def waves(specs: list[str], alive: int) -> list[list[str]]:
    """The specs in groups of at most `alive`, each with all anchors (more than `alive` only if those alone are)."""
    anchors = [spec for spec in specs if spec in ANCHORS]
    others = [spec for spec in specs if spec not in ANCHORS]
    size = max(1, alive - len(anchors))
    return [anchors + others[i : i + size] for i in range(0, len(others), size)] or [anchors]


def run_wave(specs: list[str], work: Workload, args: argparse.Namespace, load: Load) -> list[Result]:
    results = [Result(spec) for spec in specs]
    with contextlib.ExitStack() as stack, ERR.status("") as status:
        crews: dict[str, Crew] = {}
        for result in results:
            status.update(f"{title(result.spec)}: building and checking")
            crew = stack.enter_context(Crew(result.spec, work, args.world))
            with recorded(result):
                crew.call("build", timeout=args.timeout)
                result.first = mean_over_ranks(crew.call("check", CHECKED_STEPS, timeout=args.timeout))
                crews[result.spec] = crew
        for number in range(args.rounds):
            for result in rotated([r for r in results if r.status == "ok"], number):
                status.update(f"round {number + 1} of {args.rounds}: {title(result.spec)}")
                with recorded(result):
                    measure(result, crews[result.spec], args, load)
        for result in (r for r in results if r.status == "ok"):
            with recorded(result):
                result.report = crews[result.spec].call("report", timeout=args.timeout)[0]
    add_ratios(results)
    return results


@contextlib.contextmanager
def recorded(result: Result) -> Any:
    """A crew that fails fails its variant, not the run."""
    try:
        yield
    except CrewFailed as error:
        result.fail(error)


def measure(result: Result, crew: Crew, args: argparse.Namespace, load: Load) -> None:
    """One round of one variant. A step is as slow as its slowest rank, phase by phase as rank 0 saw it."""
    ranks = quiet_burst(crew, args, load)
    cpu = sum(rank["cpu"] for rank in ranks)
    totals = [max(map(sum, step)) for step in zip(*(rank["phases"] for rank in ranks), strict=True)]
    result.rounds.append(statistics.median(totals))
    result.phases.append(tuple(map(statistics.median, zip(*ranks[0]["phases"], strict=True))))
    result.cpu.append(cpu / sum(rank["steps"] for rank in ranks))


def quiet_burst(crew: Crew, args: argparse.Namespace, load: Load) -> list[dict[str, Any]]:
    """Steps during which others left the machine alone, repeated for at most `--patience` seconds."""
    deadline = time.monotonic() + args.patience
    while True:
        burst = Load()
        burst.start()
        ranks = crew.call("steps", args.steps, timeout=args.timeout)
        burst.stop(sum(rank["cpu"] for rank in ranks))
        if burst.share <= QUIET or time.monotonic() >= deadline:
            load.add(burst)
            return ranks
        time.sleep(1)


def rotated(items: list[Result], by: int) -> list[Result]:
    """Another one first in each round, so that none always follows the same neighbour's end of the cache."""
    start = by % len(items) if items else 0
    return items[start:] + items[:start]


def mean_over_ranks(ranks: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """Per step the loss of the global batch and the gradient's norm, which all ranks agree on."""
    return [(statistics.fmean(loss for loss, _ in step), step[0][1]) for step in zip(*ranks, strict=True)]


def add_ratios(results: list[Result]) -> None:
    """Per round, each variant's time over that of each reference of the same wave."""
    timed = [r for r in results if r.rounds]
    references = {r.spec: r for r in timed if r.spec in ("eager", "compile", "ddp", "ddp-compiled")}
    if sharded := [r for r in timed if r.spec.startswith("fsdp")]:
        references[FULLY_SHARD] = min(sharded, key=lambda r: r.median)
    for result in timed:
        for name, other in references.items():
            pairs = zip(result.rounds, other.rounds, strict=False)
            result.ratios[name] = [mine / theirs for mine, theirs in pairs]


def compare_losses(results: dict[str, Result], against: str, dtype: str, device: str) -> None:
    """Says in each result how its first steps differ from the reference's, if by more than rounding."""
    want = results[against].first
    for result in results.values():
        if result.first and want:
            result.mismatch = difference(result.first, want, *TOLERANCE[dtype])
    stages = [results[s] for s in STAGES[1:] if s in results and results[s].first]
    for stage in stages[1:]:
        pairs = zip(stage.first, stages[0].first, strict=True)
        if any(not abs(a - b) <= ALIKE[device] * abs(b) for (a, _), (b, _) in pairs):
            stage.mismatch = stage.mismatch or f"losses not equal to {stages[0].spec}'s"


def difference(have: list[tuple[float, float]], want: list[tuple[float, float]], loss: float, norm: float) -> str:
    for step, ((a, g), (b, h)) in enumerate(zip(have, want, strict=True)):
        if not abs(a - b) <= loss:
            return f"step {step}: loss {a:.6f}, reference {b:.6f}"
        if not math.isnan(g) and not abs(g - h) <= norm * h:
            return f"step {step}: gradient norm {g:.6f}, reference {h:.6f}"
    return ""


def bare_collectives(work: Workload, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of each collective over the model's fp32 bytes, the median of five, with nothing else running."""
    with Crew(BARE, work, args.world) as crew:
        runs = [crew.call("collectives", 4 * work.parameters, PIECE) for _ in range(6)][1:]
    slowest = [{name: max(rank[name] for rank in ranks) for name in ranks[0]} for ranks in runs]
    return {name: statistics.median(run[name] for run in slowest) for name in slowest[0]}


def show(results: dict[str, Result], skipped: dict[str, str], args: argparse.Namespace, load: Load) -> None:
    names = list(dict.fromkeys(name for r in results.values() for name in r.ratios))
    table = Table(title=f"step, median of {args.rounds} rounds of {args.steps}; ratios of time: less is faster")
    for column in (
        "variant",
        "ms",
        "least",
        "forward",
        "backward",
        "update",
        "CPU ms",
        *(f"/ {n}" for n in names),
        "losses",
    ):
        table.add_column(column, justify="left" if column in ("variant", "losses") else "right")
    for result in results.values():
        table.add_row(*row(result, names))
    for spec, reason in skipped.items():
        table.add_row(title(spec), *["-"] * (6 + len(names)), f"skipped: {reason}")
    OUT.print(table)
    for result in results.values():
        if result.mismatch:
            OUT.print(f"[bold red]LOSSES DIFFER[/] {title(result.spec)}: {result.mismatch}")
        if result.status != "ok":
            ERR.print(
                f"[bold red]{title(result.spec)} {result.status}[/]\n{result.detail}", markup=False, soft_wrap=True
            )
        if args.report and result.report:
            OUT.print(f"{title(result.spec)}:\n{result.report}", markup=False, soft_wrap=True)
    loud = "[bold red]NOISY[/]: " if load.share > QUIET else ""
    OUT.print(f"{loud}other processes took {load.share:.0%} of the machine during the timed steps")


def row(result: Result, names: list[str]) -> list[str]:
    if not result.rounds:
        return [title(result.spec), *["-"] * (6 + len(names)), f"[red]{result.status}[/]"]
    state = result.status if result.status != "ok" else ("[red]DIFFER[/]" if result.mismatch else "agree")
    times = [result.median, min(result.rounds), *(result.phase(i) for i in range(3)), statistics.median(result.cpu)]
    return [title(result.spec), *(f"{t * 1e3:.0f}" if t > 0.1 else f"{t * 1e3:.1f}" for t in times),
            *(spread(result.ratios.get(name, [])) for name in names), state]  # fmt: skip


def spread(ratios: list[float]) -> str:
    """The median with the quartiles beside it."""
    if len(ratios) < 2:
        return f"{ratios[0]:.3f}" if ratios else "-"
    if set(ratios) == {1.0}:
        return "1"
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return f"{middle:.3f} [{low:.2f} {high:.2f}]".replace("[", "\\[")


def show_collectives(bare: dict[str, float], work: Workload) -> None:
    if not bare:
        return
    size = 4 * work.parameters
    each = ", ".join(f"{name} {t * 1e3:.0f} ms ({size / t / 1e9:.2f} GB/s)" for name, t in bare.items())
    zero3 = 2 * bare["all-gather"] + bare["reduce-scatter"]
    OUT.print(f"bare collectives of the model's {size / 1e6:.0f} MB of fp32 in 16 MiB pieces: {each}", soft_wrap=True)
    OUT.print(f"of which stage 3 needs {zero3 * 1e3:.0f} ms, stages 1 and 2 "
              f"{(bare['all-gather'] + bare['reduce-scatter']) * 1e3:.0f} ms, DDP {bare['all-reduce'] * 1e3:.0f} ms",
              soft_wrap=True)  # fmt: skip


def record(
    work: Workload, args: argparse.Namespace, facts: dict[str, Any], load: Load,
    results: dict[str, Result], skipped: dict[str, str], bare: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    return {
        "benchmark": "step",
        "command": " ".join(sys.argv),
        "machine": facts,
        "workload": asdict(work),
        "world": args.world,
        "others": load.share,
        "collectives": bare,
        "variants": {spec: {**asdict(result), "median": result.median} for spec, result in results.items()},
        "skipped": skipped,
    }


if __name__ == "__main__":
    sys.exit(main())
