"""Wall time of the first training step, tracing and compilation included, as depth grows, with a cold or a warm cache.

    python benchmarks/first_step.py                        # 12, 24 and 48 layers, on 1 and on 2 processes
    python benchmarks/first_step.py --layers 12,24 --worlds 1 --repeats 3
    python benchmarks/first_step.py --model llama --dim 384 --heads 6 --layers 24 --worlds 2 --warm --repeats 3 \\
        --variants fsdp-compiled,zg3

Prediction. A deep model is traced layer by layer but its distinct segments are compiled once, so zerograph's first
step takes at most 0.6 of the time of `torch.compile` with Inductor at 24 layers, and its own at 48 layers at most 1.4
of that at 12, where `torch.compile` grows about in proportion to depth.

Method. Every measurement has fresh processes and an empty Inductor cache, which the ranks of one run share as they do
in real life. With `--warm` fresh processes then do the same again with the cache that the first ones left. The modules
that a first call would import are imported before it. "First" is the first step; "steady" the median of the next ones,
to be subtracted for compilation alone; "CPU" the first step's CPU time of one rank with its C++ compilers, which other
load disturbs less. Models are small (d=128), as only depth matters here.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from crew import Crew, CrewFailed, runnable
from facts import Load, append_json, describe, machine_facts, processes
from model import TRANSFORMERS, Workload
from rich.console import Console
from rich.table import Table
from variants import parse, title

OUT, ERR = Console(width=None if sys.stdout.isatty() else 140), Console(stderr=True)
ALONE = ["compile", "zg1", "zg3"]
TOGETHER = ["ddp-compiled", "fsdp-compiled", "zg1", "zg3"]


@dataclass(frozen=True, slots=True)
class Case:
    spec: str
    world: int
    layers: int
    warm: bool = False


@dataclass(frozen=True, slots=True)
class FirstStep:
    """Seconds; of the slowest rank."""

    first: float
    steady: float
    cpu: float
    others: float  # the share of the machine that other processes took meanwhile


def main() -> int:
    args = arguments()
    OUT.print(describe(facts := machine_facts(args.device)), soft_wrap=True)
    found: dict[Case, list[FirstStep]] = {}
    failed: dict[Case, str] = {}
    for _ in range(args.repeats):
        for case in cases(args):
            with ERR.status(f"{title(case.spec)}, {case.world} process(es), {case.layers} layers"):
                try:
                    for warm, step in enumerate(
                        first_steps(case, workload(args, case.layers), args.timeout, args.warm)
                    ):
                        found.setdefault(replace(case, warm=bool(warm)), []).append(step)
                except CrewFailed as error:
                    failed[case] = str(error)
                    ERR.print(f"{case}: {error}\n{error.detail}", markup=False, soft_wrap=True)
    for world in args.worlds:
        for warm in (False, True):
            show({c: f for c, f in found.items() if (c.world, c.warm) == (world, warm)}, args.layers)
    for case, reason in failed.items():
        OUT.print(f"FAILED {title(case.spec)}, {case.world} process(es), {case.layers} layers: {reason}", markup=False)
    if args.json:
        runs = [{**asdict(case), "runs": [asdict(step) for step in steps]} for case, steps in found.items()]
        append_json(args.json, {"benchmark": "first_step", "command": " ".join(sys.argv), "machine": facts,
                                "workload": asdict(workload(args, 0)), "results": runs})  # fmt: skip
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layers", type=integers, default=[12, 24, 48])
    add("--model", choices=["gpt", *TRANSFORMERS], default="gpt")
    add("--warm", action="store_true", help="also measure a restart, with the cache that the first start left")
    add("--worlds", type=integers, help="process counts; default 1 and 2, on CUDA 1 and one for each GPU")
    add("--dim", type=int, default=128)
    add("--heads", type=int, default=4)
    add("--batch", type=int, default=2)
    add("--seq", type=int, default=64)
    add("--dtype", choices=["fp32", "bf16"], default="fp32")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--variants", help=f"default {','.join(ALONE)} alone, else {','.join(TOGETHER)}; the first is the baseline")
    add("--repeats", type=int, default=1)
    add("--timeout", type=float, default=1200)
    add("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    args.worlds = list(dict.fromkeys(processes(parser, n, args.device) for n in args.worlds or (1, None)))
    return args


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def workload(args: argparse.Namespace, layers: int) -> Workload:
    return Workload(layers, args.dim, args.heads, 8192, args.batch, args.seq, args.dtype, args.device, args.model)


def cases(args: argparse.Namespace) -> list[Case]:
    """Depth by depth, the variants of one depth next to each other in time."""
    found = []
    for world in args.worlds:
        specs = args.variants.split(",") if args.variants else (ALONE if world == 1 else TOGETHER)
        for spec in specs:
            parse(spec)
        can, cannot = runnable(specs)
        for spec, reason in cannot.items():
            ERR.print(f"skipped {title(spec)}: {reason}")
        found += [Case(spec, world, layers) for layers in args.layers for spec in can]
    return found


def first_steps(case: Case, work: Workload, timeout: float, warm: bool) -> list[FirstStep]:
    """The first step with an empty cache, and where asked for that of a restart."""
    with tempfile.TemporaryDirectory(prefix="zerograph-cache-") as cache:
        return [first_step(case, work, timeout, Path(cache)) for _ in range(1 + warm)]


def first_step(case: Case, work: Workload, timeout: float, cache: Path) -> FirstStep:
    """Builds the model in fresh processes and runs it for the first time."""
    load = Load()
    with Crew(case.spec, work, case.world, cache) as crew:
        crew.call("imports", timeout=timeout)
        crew.call("build", timeout=timeout)
        load.start()
        first = crew.call("steps", 1, 0, timeout=timeout)
        load.stop(sum(rank["cpu"] for rank in first))
        steady = crew.call("steps", 3, 1, timeout=timeout)
    return FirstStep(
        max(sum(rank["phases"][0]) for rank in first),
        max(statistics.median(map(sum, rank["phases"])) for rank in steady),
        max(rank["cpu"] for rank in first),
        load.share,
    )


def show(found: dict[Case, list[FirstStep]], depths: list[int]) -> None:
    """One row per variant and depth, with ratios to the baseline of that depth and to itself at the first depth."""
    if not found:
        return
    first = next(iter(found))
    baseline = first.spec
    table = Table(title=f"first step on {first.world} process(es), {'warm' if first.warm else 'cold'} cache")
    ratios = f"/ {baseline}", f"/ {depths[0]} layers"
    for column in ("variant", "layers", "first s", "steady s", "CPU s", *ratios, "others"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for case, steps in sorted(found.items(), key=lambda item: depths.index(item[0].layers)):
        same_depth, same_variant = replace(case, spec=baseline), replace(case, layers=depths[0])
        middle = median(steps)
        table.add_row(
            title(case.spec), str(case.layers), f"{middle.first:.1f}", f"{middle.steady:.2f}", f"{middle.cpu:.1f}",
            ratio(middle, found.get(same_depth)), ratio(middle, found.get(same_variant)), f"{middle.others:.0%}",
        )  # fmt: skip
    OUT.print(table)


def median(steps: list[FirstStep]) -> FirstStep:
    """The run with the median first step."""
    return sorted(steps, key=lambda step: step.first)[len(steps) // 2]


def ratio(mine: FirstStep, theirs: list[FirstStep] | None) -> str:
    return f"{mine.first / median(theirs).first:.2f}" if theirs else "-"


if __name__ == "__main__":
    sys.exit(main())
