"""Activations on NVMe: resident peak and time of a step, beside keeping them and beside computing them again.

    python benchmarks/activations.py --directory DIR [--seq 128 512] [--rounds 5] [--json FILE]

Prediction. With activations on NVMe the resident peak falls by as much as the forecast of the programs does, within 5%
of the peak. Where the forecast hides the transfers, they cost at most 5% of the step: the processor copies what is
written into aligned memory once, in a thread beside the one that computes.

Method. One process per variant, stage 0 on one rank, a GPT and AdamW. Two variants at a time take steps in turns, and
ratios are taken within a round; the values are medians. The peak is the kernel's VmHWM over steps after the first ones.
CPU seconds are those of the process, the thread that copies included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch
from crew import Crew, beside
from facts import append_json, describe, machine_facts
from model import GPT, Workload

from zerograph.core.machine import machine_from
from zerograph.dryrun.compile_only import compile_only
from zerograph.dryrun.forecast import forecast_file

BASE = "zg0"


def main() -> None:
    args = arguments()
    facts = machine_facts("cpu")
    print(describe(facts))
    for seq in args.seq:
        work = Workload(args.layers, args.dim, 16, 8192, args.batch, seq)
        print(work.describe())
        ways = {
            "recompute=full": {"recompute": "full"},
            "NVMe": {"activations": "nvme", "path": str(args.directory)},
            "NVMe, recompute=full": {"activations": "nvme", "path": str(args.directory), "recompute": "full"},
        }
        forecasts = {way: forecast(work, args.machine, options) for way, options in {"kept": {}, **ways}.items()}
        for way, options in ways.items():
            if args.only and way not in args.only:
                continue
            spec = ":".join([BASE, *(f"{name}={value}" for name, value in options.items())])
            with Crew(BASE, work, 1) as kept, Crew(spec, work, 1) as other:
                turns = beside({"kept": kept, "other": other}, args.rounds, args.timeout)
            found = {**turns.peaks, "wall": statistics.median(turns.wall), "cpu": statistics.median(turns.cpu)}
            (before, seconds), (after, more) = forecasts["kept"], forecasts[way]
            fell, predicted = found["kept"] - found["other"], before - after
            print(
                f"  {way}: peak {found['kept'] / 1e6:.0f} -> {found['other'] / 1e6:.0f} MB, "
                f"falls by {fell / 1e6:.0f} ({predicted / 1e6:.0f} forecast: "
                f"{abs(fell - predicted) / found['kept']:.1%} of the peak apart); "
                f"step {found['wall']:.3f} of kept by the clock, {found['cpu']:.3f} by CPU seconds "
                f"({more / seconds:.3f} forecast)"
            )
            if args.json:
                result = {"way": way, "seq": seq, "measured": found, "forecast": [before, after]}
                record = {"benchmark": "activations", "command": " ".join(sys.argv), "machine": facts}
                append_json(args.json, record | result)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--directory", type=Path, required=True, help="a folder on the disk")
    add("--machine", default="cpu", help="what forecasts go by: a preset, or a file from `zerograph bench`")
    add("--layers", type=int, default=12)
    add("--dim", type=int, default=1024)
    add("--batch", type=int, default=4)
    add("--seq", type=int, nargs="+", default=[128, 512])
    add("--only", nargs="+", help="of the ways, by name")
    add("--rounds", type=int, default=5)
    add("--timeout", type=float, default=1200)
    add("--json", type=Path, help="append the results to this JSON Lines file")
    return parser.parse_args()


def forecast(work: Workload, machine: str, options: dict[str, str]) -> tuple[int, float]:
    """Bytes at the peak of the programs, and seconds of the step."""

    def make() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
        tokens = torch.zeros(work.batch, work.seq, dtype=torch.int64)
        return GPT(work), (tokens, tokens)

    found = compile_only(make, world_size=1, stage=0, **options)
    file = forecast_file("GPT", found, machine_from(machine))
    return file.forecast.peaks["device"].bytes, file.forecast.seconds


if __name__ == "__main__":
    main()
