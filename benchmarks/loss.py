"""Head and loss in tiles of tokens: resident peak and time of a step, beside logits that are whole.

    python benchmarks/loss.py [--tiles 16] [--rounds 5] [--json FILE]

Prediction. Beyond weights, gradients and optimizer states, the peak at 16 tiles is at most 0.2 of that without: logits
of 2048 x 131072 numbers are 1 GiB, and a step holds about three such tensors. The backward computes each tile's logits
again, a fourth product beside three: of this model the step takes at most 1.15 of the time.

Method. One process per variant, stage 0 on one rank, a GPT and AdamW. Two variants at a time take steps in turns, and
ratios are taken within a round; the values are medians. The peak is the kernel's VmHWM over steps after the first ones,
less what is resident between steps: parameters and optimizer states, and kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from crew import Crew
from facts import append_json, describe, machine_facts
from model import Workload

WHOLE = "zg0"


def main() -> None:
    args = arguments()
    facts = machine_facts("cpu")
    print(describe(facts))
    work = Workload(args.layers, args.dim, 16, args.vocab, 1, args.seq)
    print(work.describe())
    for spec in [f"{WHOLE}:loss_tiles={args.tiles}", *args.beside]:
        with Crew(WHOLE, work, 1) as whole, Crew(spec, work, 1) as other:
            found = beside({WHOLE: whole, spec: other}, args.rounds, args.timeout)
        print(
            f"  {spec}: {found['other'] / 2**20:.0f} MiB beyond what stays, {WHOLE} {found['whole'] / 2**20:.0f}: "
            f"{found['other'] / found['whole']:.3f}; step {found['wall']:.3f} by the clock "
            f"({found['least']:.3f} to {found['most']:.3f}), {found['cpu']:.3f} by CPU seconds"
        )
        if args.json:
            told = {"benchmark": "loss", "command": " ".join(sys.argv), "machine": facts, "variant": spec}
            append_json(args.json, told | {"measured": found})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiles", type=int, default=16)
    add("--layers", type=int, default=1)
    add("--dim", type=int, default=1024)
    add("--vocab", type=int, default=2**17)
    add("--seq", type=int, default=2048)
    add("--beside", nargs="*", default=["compile", "compile-chunker", "compile-liger"], help="other variants")
    add("--rounds", type=int, default=5)
    add("--timeout", type=float, default=1200)
    add("--json", help="append the results to this JSON Lines file")
    return parser.parse_args()


def beside(crews: dict[str, Crew], rounds: int, timeout: float) -> dict[str, float]:
    """Peaks of two crews beyond what is resident between steps, and the ratios of the second's time to the first's."""
    stays = {}
    for name, crew in crews.items():
        crew.call("imports", timeout=timeout)
        crew.call("build", timeout=timeout)
        crew.call("steps", 2, 0, timeout=timeout)
        crew.call("reset_peak")
        stays[name] = crew.call("memory")[0]["peak"]
    wall, processor = [], []
    for number in range(rounds):
        order = list(crews) if number % 2 else list(crews)[::-1]
        told = {name: crews[name].call("steps", 1, 0, timeout=timeout)[0] for name in order}
        theirs, mine = (told[name] for name in crews)
        wall.append(sum(mine["phases"][0]) / sum(theirs["phases"][0]))
        processor.append(mine["cpu"] / theirs["cpu"])
    whole, other = (crew.call("memory")[0]["peak"] - stays[name] for name, crew in crews.items())
    times = {"wall": statistics.median(wall), "least": min(wall), "most": max(wall)}
    return {"whole": whole, "other": other, **times, "cpu": statistics.median(processor)}


if __name__ == "__main__":
    main()
