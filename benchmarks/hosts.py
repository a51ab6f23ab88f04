"""Training steps over several hosts: sharded over all ranks, or within each host with replicas between them (HSDP).

    python benchmarks/hosts.py                       # 2 hosts of 2 ranks, links of 200 Mbit/s
    python benchmarks/hosts.py --rate 1gbit --rounds 9
    python benchmarks/hosts.py --parts 8 --batch 8   # a batch in parts, beside a loop that accumulates gradients
    python benchmarks/hosts.py --experts             # a Mixtral, with experts whole on each rank and divided
    python benchmarks/hosts.py zg3 fsdp              # these variants alone, beside DDP

Hosts are network namespaces of this machine (`namespaces.py`); ranks of one share its memory, and between hosts there
is gloo over a link that `tc` shapes. It takes root and `iproute2`.

Prediction. By bytes: of P bytes of fp32 parameters a ring over all ranks sends 2.9 P per host and step at stage 3
(gloo's passes every gather through each host, and every reduction twice), as `fully_shard` does. In two levels it is
0.5 P for each of two gathers and a reduction of two hosts: 1.5 P at stage 3 and 1.0 P below, as with replicas. At
200 Mbit/s that is the step: half of the time of `fully_shard` over all ranks, two thirds of compiled DDP's at stages 1
and 2, and replicas no longer than `fully_shard` on the same mesh. Int8 gathers are 0.13 P each, and an int4 reduction
0.06 P: 0.31 P at stage 3 and a third of its time. Where hosts keep what came from others for the backward, one gather
less: 0.2 P, as at stage 2, and its time. In parts of the batch each weight is gathered twice
and reduced once, whatever the parts: of eight an eighth of the loop's bytes, and 0.2 of its time, as the link is what a
step waits for. Of a Mixtral experts are eight tenths of P. Divided over all four ranks these are not sent at all, and
256 tokens of 2 choices of each rank, 1 KiB each, go to the other host 5 times in half of the cases: 2.6 MB in each of
4 layers and 11 MB per host. Divided inside of hosts they halve what goes between these: wrong, as two levels
do so already.

Method. As in `step.py`: each variant has its own processes, the order rotates from round to round, ratios are taken
within a round, and losses are compared with DDP's. Bytes are those that the first host has sent meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from crew import Crew
from facts import Load, append_json, describe, machine_facts
from model import Workload
from namespaces import Host, Hosts
from rich.console import Console
from rich.table import Table
from step import (
    CHECKED_STEPS,
    Result,
    add_ratios,
    compare_losses,
    difference,
    mean_over_ranks,
    measure,
    rotated,
    spread,
)
from variants import title

from zerograph.core.machine import Link, machine_named

OUT = Console(width=None if sys.stdout.isatty() else 160)
REFERENCE = "ddp"
FLAT = ("zg3", "fsdp", "fsdp-compiled")
KEPT = "zgauto:memory=43MiB:recompute=0:bucket_size=4MiB"
"""Room for the parts that hosts keep of the default model's buckets, and not for whole ones."""
WIRE = "gather_wire=int8:reduce_wire=int4"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ROUNDED = (0.01, 0.03)
"""What fewer bits may change of a loss, and of a gradient's norm as its share."""


def main() -> int:
    args = arguments()
    kind = "mixtral" if args.experts else "gpt"
    work = Workload(args.layers, args.dim, args.dim // 64, 2048, args.batch, args.seq, model=kind)
    specs = [REFERENCE, "ddp-compiled", "zg1", "zg2", *FLAT, *(f"{spec}:replicas={args.hosts}" for spec in FLAT)]
    specs += [f"{stage}:{WIRE}" for stage in ("zg2", "zg3", f"{KEPT}:machine={machine_file(args.rate)}")]
    if args.parts > 1:
        specs = [REFERENCE, *(f"{spec}:loop={args.parts}" for spec in FLAT), f"zg3:batch_tiles={args.parts}"]
    if args.experts:
        divided = [f"zg3:experts={ranks}" for ranks in (args.ranks, args.ranks * args.hosts)]
        specs = [REFERENCE, "zg3", *divided, "fsdp"]
    specs = [REFERENCE, *args.variants] if args.variants else specs
    facts, load = machine_facts("cpu"), Load()
    OUT.print(f"{work.describe()}\n{args.hosts} hosts of {args.ranks} ranks, {args.rate}; {describe(facts)}")
    with Hosts(args.hosts, args.rate) as hosts:
        sent = run(results := [Result(spec) for spec in specs], work, args, hosts, load)
    add_ratios(results)
    compare_losses({r.spec: r for r in results if "wire" not in r.spec}, REFERENCE, "fp32", "cpu")
    for result in results:
        if "wire" in result.spec:
            result.mismatch = difference(result.first, results[0].first, *ROUNDED)
    show(results, sent, 4 * work.parameters, args, load)
    if args.json:
        rows = {r.spec: {"rounds": r.rounds, "sent": sent[r.spec], "mismatch": r.mismatch} for r in results}
        append_json(args.json, {"rate": args.rate, "hosts": args.hosts, "ranks": args.ranks, **facts, "variants": rows})
    return 1 if any(r.mismatch for r in results) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("variants", nargs="*", help="as `step.py` takes them; default: all that the results list")
    add("--hosts", type=int, default=2)
    add("--ranks", type=int, default=2, help="of each host")
    add("--rate", default="200mbit", help="at which a host sends, as tc takes it")
    add("--layers", type=int, default=4)
    add("--dim", type=int, default=256)
    add("--batch", type=int, default=2, help="sequences per rank")
    add("--seq", type=int, default=128)
    add("--parts", type=int, default=1, help="parts of each rank's batch, one after another")
    add("--experts", action="store_true", help="of a Mixtral of 4 experts a layer, whole on each rank and divided")
    add("--rounds", type=int, default=5)
    add("--steps", type=int, default=3, help="timed steps per variant and round")
    add("--timeout", type=float, default=600, help="seconds a command may take before its variant counts as hung")
    add("--json", type=Path, help="append the result to this JSON Lines file")
    args = parser.parse_args()
    args.patience = 0
    return args


def machine_file(rate: str) -> Path:
    """A machine whose network sends at ``rate``, as `tc` takes it: what a search weighs gathers by."""
    size, unit = rate[:-4], rate[-4:]
    machine = replace(machine_named("cpu"), inter=Link(float(size) * BITS[unit] / 8, 1e-3))
    path = Path(tempfile.gettempdir(), f"{rate}.json")
    path.write_text(machine.to_json())
    return path


def run(
    results: list[Result], work: Workload, args: argparse.Namespace, hosts: list[Host], load: Load
) -> dict[str, float]:
    """Take the steps; returns the bytes that the first host sent in a step of each variant."""
    sent: dict[str, list[float]] = {result.spec: [] for result in results}
    by_rank = [host for host in hosts for _ in range(args.ranks)]
    with contextlib.ExitStack() as stack:
        crews = {r.spec: stack.enter_context(Crew(r.spec, work, len(by_rank), hosts=by_rank)) for r in results}
        for result in results:
            crews[result.spec].call("build", timeout=args.timeout)
            result.first = mean_over_ranks(crews[result.spec].call("check", CHECKED_STEPS, timeout=args.timeout))
        for number in range(args.rounds):
            for result in rotated(results, number):
                before = hosts[0].sent()
                measure(result, crews[result.spec], args, load)
                sent[result.spec].append((hosts[0].sent() - before) / (args.steps + 1))  # with the one to warm up
    return {spec: statistics.median(each) for spec, each in sent.items()}


def show(results: list[Result], sent: dict[str, float], size: int, args: argparse.Namespace, load: Load) -> None:
    names = list(dict.fromkeys(name for r in results for name in r.ratios))
    table = Table(title=f"step, median of {args.rounds} rounds of {args.steps}; ratios of time: less is faster")
    for column in ("variant", "ms", "sent per host / parameters", *(f"/ {n}" for n in names), "losses"):
        table.add_column(column, justify="left" if column in ("variant", "losses") else "right")
    for result in results:
        table.add_row(
            title(result.spec), f"{result.median * 1e3:.0f}", f"{sent[result.spec] / size:.2f}",
            *(spread(result.ratios.get(name, [])) for name in names), result.mismatch or "agree",
        )  # fmt: skip
    OUT.print(table)
    OUT.print(f"other processes took {load.share:.0%} of the machine during the timed steps")


if __name__ == "__main__":
    raise SystemExit(main())
