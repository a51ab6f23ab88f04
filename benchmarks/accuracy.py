"""How far forecasts are from what steps then take: memory of the runtime and of the process, and time.

    python benchmarks/accuracy.py                     # models and stages, 2 gloo ranks; about twenty minutes
    python benchmarks/accuracy.py --cases 0,4 --machine machine.json
    python benchmarks/accuracy.py --cases 14,15,16,17,18,19,20,21,22,23  # transformers' models, with large vocabularies
    python benchmarks/accuracy.py --cases 24,25,26,27,28,29  # states, and everything, on NVMe
    python benchmarks/accuracy.py --cases 30,31,32,33,34,35  # weights, losses and batches in tiles, activations on NVMe
    python benchmarks/accuracy.py --cases 36,37  # bfloat16, in which attention is far slower than products
    python benchmarks/accuracy.py --cases 14,16,18 --budgets 0.8,0.9,1,1.2  # whether `memory=` is kept

Prediction. The forecast of the peak is within 5% of what torch's allocator hands out, within 10% of the growth of the
process where the model has more than 1 GB of states, and the forecast of the step's time within 20%.

Method. `zerograph bench` measures the machine before every case, since a shared one changes from minute to minute,
unless its file is given. Each case has fresh processes, which train 4 steps, record one (`backend.record()`), and train
5 more; "step" is the median of those 5, of the slowest rank. "Forecast" simulates the programs by the machine's rates
alone; "re-timed" with the recorded step's seconds per segment and collective in their place. "Process" is the growth of
resident memory from before the model was built to the peak of the last steps, as the kernel counts it; its forecast is
the peak and what `zerograph/planner/programs/process_memory.py` adds.

With `--budgets` each case is trained again with `stage="auto"` and `memory=` of so many times its recorded peak.
Prediction: no recorded peak is above its budget.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import gettempdir

from crew import Crew, CrewFailed
from facts import Load, append_json, describe, machine_facts
from model import Workload
from rich.console import Console
from rich.table import Table
from variants import title

OUT, ERR = Console(width=None if sys.stdout.isatty() else 150), Console(stderr=True)
RANKS = 2
SMALL, MIDDLE, LARGE = Workload(4, 256, 4, 2048), Workload(6, 512, 8), Workload(12, 1024, 16)
WORDY = Workload(4, 512, 8, vocab=65536)
CASES = [
    (SMALL, "zg1"),
    (SMALL, "zg2"),
    (SMALL, "zg3"),
    (MIDDLE, "zg1"),
    (MIDDLE, "zg3"),
    (MIDDLE, "zg3:recompute=full"),
    (MIDDLE, "zg3:bucket_size=4MiB:prefetch=2"),
    (Workload(12, 512, 8, batch=2, seq=256), "zg2"),
    (LARGE, "zg1"),
    (LARGE, "zg3"),
    (LARGE, "zg2"),
    (LARGE, "zg3:recompute=full"),
    (Workload(16, 896, 14), "zg3"),
    (Workload(8, 1280, 20), "zg3"),
    (Workload(6, 512, 8, vocab=8000, seq=256, model="llama"), "zg3"),
    (Workload(6, 512, 8, vocab=8000, seq=256, model="llama"), "zg2"),
    (Workload(4, 256, 4, vocab=30000, batch=2, model="qwen"), "zg3"),
    (Workload(4, 256, 4, vocab=16000, batch=2, model="mixtral"), "zg3"),
    (Workload(4, 256, 8, vocab=16000, model="t5"), "zg3"),
    (Workload(4, 256, 4, vocab=16000, model="bert"), "zg3"),
    (Workload(6, 256, 8, vocab=1000, batch=16, seq=64, model="vit"), "zg3"),
    (Workload(16, 0, 0, vocab=1000, batch=8, seq=96, model="resnet"), "zg3"),
    (Workload(4, 256, 4, vocab=30000, batch=2, model="gemma2"), "zg3"),
    (Workload(4, 256, 4, vocab=16000, model="neox"), "zg3"),
    *((work, spec) for work in (MIDDLE, LARGE) for spec in ("zg2-nvme", "zg3-nvme", "zg3-infinity")),
    (WORDY, "zg3:loss_tiles=16"),
    (MIDDLE, "zg3:bucket_size=1MiB:tile=4"),
    (LARGE, f"zg2:activations=nvme:path={gettempdir()}"),
    (LARGE, f"zg3:bucket_size=4MiB:tile=4:loss_tiles=4:activations=nvme:path={gettempdir()}"),
    (Workload(6, 512, 8, batch=8, seq=128), "zg3:batch_tiles=4:loss_tiles=8"),
    (Workload(6, 512, 8, vocab=8000, batch=8, seq=128, model="llama"), "zg3:batch_tiles=4:loss_tiles=8"),
    *((Workload(4, 512, 8, vocab=8000, batch=2, seq=seq, model="llama", dtype="bf16"), "zg3") for seq in (256, 1024)),
]
TELLING = 2**30
"""Bytes of states from which the growth of a process tells something: below, code and compilers are most of it."""


@dataclass(frozen=True, slots=True)
class Found:
    """Bytes and seconds of the rank that needs most."""

    peak: int
    forecast_peak: int
    nvme: int
    forecast_nvme: int
    growth: int
    forecast_growth: int
    step: float
    forecast: float
    retimed: float
    others: float


def main() -> int:
    args = arguments()
    OUT.print(describe(facts := machine_facts("cpu")), soft_wrap=True)
    table = Table(title=f"forecast / measured, {RANKS} ranks")
    columns = "model", "variant", "peak MB", "forecast", "NVMe MB", "forecast", "process"
    for column in (*columns, "step s", "forecast", "re-timed", "others"):
        table.add_column(column, justify="left" if column in ("model", "variant") else "right")
    budgets = Table(title=f"memory= and recorded peaks, {RANKS} ranks")
    for column in ("model", "budget MB", "peak MB", "forecast", "kept"):
        budgets.add_column(column, justify="left" if column == "model" else "right")
    results = []
    for work, spec in [CASES[i] for i in args.cases]:
        machine = args.machine or measured_machine()
        with ERR.status(f"{title(spec)}, {work.layers} layers of {work.dim}"):
            found = measure(work, spec, machine, args.timeout)
        results.append({"workload": asdict(work), "spec": spec, "measured": Path(machine).read_text(), **asdict(found)})
        table.add_row(
            f"{work.model} {work.layers} x {work.dim}", title(spec),
            f"{found.peak / 1e6:.1f}", ratio(found.forecast_peak, found.peak),
            f"{found.nvme / 1e6:.1f}" if found.nvme else "-",
            ratio(found.forecast_nvme, found.nvme) if found.nvme else "-",
            ratio(found.forecast_growth, found.growth) if 16 * work.parameters > TELLING else "-",
            f"{found.step:.3f}", ratio(found.forecast, found.step), ratio(found.retimed, found.step),
            f"{found.others:.0%}",
        )  # fmt: skip
        for share in args.budgets:
            budgets.add_row(*within(work, int(share * found.peak), machine, args.timeout))
    OUT.print(table)
    if args.budgets:
        OUT.print(budgets)
    if args.json:
        append_json(args.json, {"benchmark": "accuracy", "command": " ".join(sys.argv), "machine": facts,
                                "results": results})  # fmt: skip
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", type=lambda text: [int(part) for part in text.split(",")], default=list(range(len(CASES))))
    add("--machine", help="what `zerograph bench -o` wrote; measured now unless given")
    add("--budgets", type=lambda text: [float(part) for part in text.split(",")], default=[])
    add("--timeout", type=float, default=1200)
    add("--json", type=Path, help="append the result to this JSON Lines file")
    return parser.parse_args()


def measured_machine() -> str:
    path = Path(tempfile.mkdtemp(prefix="zerograph-accuracy-")) / "machine.json"
    zerograph = Path(sys.executable).with_name("zerograph")
    command = [str(zerograph), "bench", "--world", str(RANKS), "-o", str(path)]
    with ERR.status("zerograph bench"):
        subprocess.run(command, check=True, capture_output=True)
    return str(path)


def measure(work: Workload, spec: str, machine: str, timeout: float) -> Found:
    load = Load()
    with Crew(spec, work, RANKS) as crew:
        crew.call("imports", timeout=timeout)
        base = crew.call("memory")
        crew.call("build", timeout=timeout)
        crew.call("steps", 0, 4, timeout=timeout)
        recorded = crew.call("recorded", machine, timeout=timeout)
        crew.call("reset_peak")
        load.start()
        steps = crew.call("steps", 5, 0, timeout=timeout)
        load.stop(sum(rank["cpu"] for rank in steps))
        after = crew.call("memory")
    most = max(recorded, key=lambda rank: rank["peak"])
    return Found(
        peak=most["peak"],
        forecast_peak=most["forecast_peak"],
        nvme=int(most["nvme"]),
        forecast_nvme=int(most["forecast_nvme"]),
        growth=max(end["peak"] - begin["rss"] for end, begin in zip(after, base, strict=True)),
        forecast_growth=int(most["forecast_growth"]),
        step=max(statistics.median(map(sum, rank["phases"])) for rank in steps),
        forecast=most["forecast"],
        retimed=max(rank["retimed"] for rank in recorded),
        others=load.share,
    )


def within(work: Workload, budget: int, machine: str, timeout: float) -> tuple[str, ...]:
    """A row about ``memory=budget``."""
    start = f"{work.model} {work.layers} x {work.dim}", f"{budget / 1e6:.1f}"
    with Crew(f"zgauto:memory={budget}", work, RANKS) as crew:
        try:
            for command in (("imports",), ("build",), ("steps", 0, 3)):
                crew.call(*command, timeout=timeout)
        except CrewFailed as failed:
            if "InfeasibleError" not in failed.detail:
                raise
            return *start, "-", "-", "nothing fits"
        most = max(crew.call("recorded", machine, timeout=timeout), key=lambda rank: rank["peak"])
    forecast = ratio(most["forecast_peak"], most["peak"])
    return *start, f"{most['peak'] / 1e6:.1f}", forecast, "yes" if most["peak"] <= budget else "NO"


def ratio(forecast: float, measured: float) -> str:
    return f"{forecast / measured:.2f}"


if __name__ == "__main__":
    sys.exit(main())
