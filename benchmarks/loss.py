"""Head and loss in tiles of tokens: resident peak and time of a step, beside logits that are whole.

    python benchmarks/loss.py [--tiles 16] [--rounds 5] [--json FILE]
    python benchmarks/loss.py --to zg0:loss_tiles=16 --beside compile-liger compile-chunker    # ratios to ours

Prediction. Beyond weights, gradients and optimizer states, the peak at 16 tiles is at most 0.2 of that without: logits
of 2048 x 131072 numbers are 1 GiB, and a step holds about three such tensors. Gradients are made in the forward, so
that logits are computed once, and each tile reads the head's weight again: of this model, nearly all of which is head,
the step takes at most 1.10 of the time. Liger's loss in plain torch, in 128 chunks, and `torch.compile` with its own
auto-chunker have no lower peak, and ours takes at most 1.05 of the time of the faster one.

Method. One process per variant, stage 0 on one rank, a GPT and AdamW. Two variants at a time take steps in turns, and
ratios are taken within a round; the values are medians. The peak is the kernel's VmHWM over steps after the first ones,
less what is resident between steps: parameters and optimizer states, and kernels.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from crew import Beside, Crew, beside
from facts import append_json, describe, machine_facts
from model import Workload


def main() -> None:
    args = arguments()
    facts = machine_facts("cpu")
    print(describe(facts))
    work = Workload(args.layers, args.dim, 16, args.vocab, 1, args.seq)
    print(work.describe())
    tiled = f"zg0:loss_tiles={args.tiles}"
    for spec in [*(() if args.to == tiled else (tiled,)), *args.beside]:
        with Crew(args.to, work, 1) as first, Crew(spec, work, 1) as other:
            found = measured(beside({args.to: first, spec: other}, args.rounds, args.timeout))
        print(
            f"  {spec}: {found['other'] / 2**20:.0f} MiB beyond what stays, {args.to} {found['first'] / 2**20:.0f}: "
            f"{found['other'] / found['first']:.3f}; step {found['wall']:.3f} by the clock "
            f"({found['least']:.3f} to {found['most']:.3f}), {found['cpu']:.3f} by CPU seconds"
        )
        if args.json:
            record = {
                "benchmark": "loss",
                "command": " ".join(sys.argv),
                "machine": facts,
                "to": args.to,
                "variant": spec,
            }
            append_json(args.json, record | {"measured": found})


def measured(found: Beside) -> dict[str, float]:
    """Peaks of both beyond what is resident between steps, and the medians of the ratios."""
    first, other = (found.peaks[name] - found.rest[name] for name in found.peaks)
    times = {"wall": statistics.median(found.wall), "least": min(found.wall), "most": max(found.wall)}
    return {"first": first, "other": other, **times, "cpu": statistics.median(found.cpu)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tiles", type=int, default=16)
    add("--layers", type=int, default=1)
    add("--dim", type=int, default=1024)
    add("--vocab", type=int, default=2**17)
    add("--seq", type=int, default=2048)
    add("--to", default="zg0", help="what ratios are to")
    add("--beside", nargs="*", default=["compile", "compile-chunker", "compile-liger"], help="other variants")
    add("--rounds", type=int, default=5)
    add("--timeout", type=float, default=1200)
    add("--json", type=Path, help="append the results to this JSON Lines file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
