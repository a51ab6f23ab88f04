"""Forecasts against training runs that others published: tokens per second and memory of Llamas on GPUs.

    python benchmarks/published.py                # ten runs; three minutes on one core, no GPU
    python benchmarks/published.py --rows 0,3

Prediction. Tokens per second are within 20% of the published ones, and memory within 10%.

Method. Each run is planned as its authors describe it: transformers' Llama with the model's sizes, one block per
bucket, the next one gathered ahead, bf16 compute over fp32 parameters, gradients summed in fp32, and their
recomputation: "full" and every other layer ("layer") by `recompute`, "op" (attention and every second product saved) by
`torch.utils.checkpoint` with their rule. Nothing is fitted: machines are presets with what the authors say of theirs.

Assumed, as the reports do not say it: the loss was not compiled. It runs beside the forecast's programs, between
forward and backward, and holds three copies of the logits in fp32 (their logarithms, and the gradients of these and of
the logits) where it needs most, beside the parameters that FSDP2 leaves whole from forward to backward: the last block
and what is in none. And torchtitan prints what the allocator reserved, which holds fragments too. So the forecast of
memory is the peak over one minus the share that plans leave free for them (`RESERVE`). Its runs on A100 were not
compiled at all, which the forecast takes them to be, and say nothing of memory.

Sources. H100: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (tables 1 and 3; arXiv 2410.06511 has the same
method). A100: torchtitan, docs/performance.md of June 2024.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from facts import append_json
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import LlamaConfig, LlamaForCausalLM

from zerograph.core.machine import GB, PRESETS, Machine
from zerograph.dryrun.forecast import plan_file
from zerograph.planner.estimate.estimate import RESERVE

Again = Literal["none", "op", "layer", "full"]


def llama(layers: int, hidden: int, heads: int, inner: int, vocab: int, kv_heads: int) -> LlamaConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab, "num_hidden_layers": layers}
    return LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False)


LLAMA_3_8B = llama(32, 4096, 32, 14336, 128256, 8)
LLAMA_3_70B = llama(80, 8192, 64, 28672, 128256, 8)
LLAMA_2_13B = llama(40, 5120, 40, 13824, 32000, 40)
LLAMA_2_70B = llama(80, 8192, 64, 28672, 32000, 8)


def limited_h100() -> Machine:
    """The authors' H100: 96 GB of HBM2e at 2.4 TB/s, and 500 W in place of 700.

    They put its peak between those of the SXM (989 T at 700 W) and the NVL (835 T at 400 W; NVIDIA's data sheet): by
    power that is 886.
    """
    sxm = PRESETS["h100-80gb"]
    peak = (835 + (989 - 835) * (500 - 400) / (700 - 400)) / 989
    return replace(
        sxm,
        device_memory=96 * GB,
        device_bandwidth=sxm.device_bandwidth * 2.4 / 3.35,
        matmul={dtype: rate * peak for dtype, rate in sxm.matmul.items()},
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One published run: tokens per second and GPU, and GiB where they are published."""

    model: str
    config: LlamaConfig
    machine: Machine
    world: int
    batch: int
    seq: int
    again: Again
    tokens: float
    gib: float | None = None


A100, H100 = PRESETS["a100-80gb"], limited_h100()
RUNS = (
    Run("Llama 3.1 8B", LLAMA_3_8B, H100, 8, 2, 8192, "op", 6667, 77.0),
    Run("Llama 3.1 8B", LLAMA_3_8B, H100, 128, 2, 8192, "op", 6514, 62.0),
    Run("Llama 3 8B", LLAMA_3_8B, A100, 64, 1, 8192, "layer", 2904),
    Run("Llama 3 8B", LLAMA_3_8B, A100, 64, 1, 8192, "op", 2973),
    Run("Llama 3 70B", LLAMA_3_70B, A100, 64, 1, 8192, "full", 331),
    Run("Llama 2 13B", LLAMA_2_13B, A100, 64, 2, 4096, "none", 2162),
    Run("Llama 2 13B", LLAMA_2_13B, A100, 64, 2, 4096, "layer", 1914),
    Run("Llama 2 13B", LLAMA_2_13B, A100, 64, 2, 4096, "op", 1904),
    Run("Llama 2 70B", LLAMA_2_70B, A100, 64, 1, 4096, "op", 355),
    Run("Llama 2 70B", LLAMA_2_70B, A100, 64, 2, 4096, "full", 353),
)
LOSS_MOVES = (2 + 4) + (4 + 4) + 4 + (4 + 4 + 4) + (4 + 2)
"""Bytes that the loss reads and writes of each logit: cast, logarithm, its gradient made, passed on, and cast back."""
RECOMPUTE = {"none": "auto", "op": "auto", "layer": 0.5, "full": "full"}


def main() -> None:
    args = arguments()
    table = Table(title="forecast / published, per GPU")
    for column in ("model", "GPUs", "batch", "recomputed", "tokens/s", "forecast", "ratio", "GiB", "forecast", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "recomputed") else "right")
    for run in (RUNS[i] for i in args.rows):
        tokens, gib = forecast(run)
        memory = (f"{run.gib:.1f}", f"{gib:.1f}", f"{gib / run.gib:.2f}") if run.gib else ("", f"{gib:.1f}", "")
        table.add_row(
            run.model, f"{run.world} {run.machine.name.partition('-')[0]}", f"{run.batch} x {run.seq}", run.again,
            f"{run.tokens:.0f}", f"{tokens:.0f}", f"{tokens / run.tokens:.2f}", *memory,
        )  # fmt: skip
        if args.json:
            record = {"model": run.model, "gpu": run.machine.name, "again": run.again, "published": run.tokens}
            append_json(args.json, {"benchmark": "published", **record, "tokens": tokens, "gib": gib})
    Console(width=120).print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: [int(n) for n in text.split(",")], default=list(range(len(RUNS))))
    parser.add_argument("--json", type=Path, help="append results to this JSON Lines file")
    return parser.parse_args()


def forecast(run: Run) -> tuple[float, float]:
    """Tokens per second and GPU, and GiB with what plans leave free."""
    with torch.device("meta"):
        model = LlamaForCausalLM(run.config)
    block, everything = (2 * sum(p.numel() for p in part.parameters()) for part in (model.model.layers[0], model))
    file = plan_file(
        run.model, functools.partial(_made, run), run.machine, world=run.world, dtype="bfloat16", stage=3,
        bucket_size=block, prefetch=1, recompute=RECOMPUTE[run.again],
    )  # fmt: skip
    found, logits = file.forecast, run.batch * run.seq * run.config.vocab_size
    backward = next(span.start for span in found.spans if span.phase == "backward")
    saved = next(level for time, level in reversed(found.memory["device"]) if time < backward)
    kept = everything - (run.config.num_hidden_layers - 1) * block
    # The logits themselves are freed before the backward of the loss begins.
    peak = max(found.peaks["device"].bytes, saved - 2 * logits + 3 * 4 * logits + kept)
    seconds = found.seconds + LOSS_MOVES * logits / run.machine.device_bandwidth
    return run.batch * run.seq / seconds, peak / (1 - RESERVE) / 2**30


def _made(run: Run) -> tuple[nn.Module, dict[str, Any]]:
    model = LlamaForCausalLM(run.config).train()
    if run.again == "op":
        for layer in model.model.layers:
            layer.forward = functools.partial(
                checkpoint, layer.forward, use_reentrant=False, context_fn=_save_operators
            )
    ids = torch.zeros(run.batch, run.seq, dtype=torch.int64)
    return model, {"input_ids": ids}


def _save_operators() -> Any:
    """Contexts of a checkpointed block that saves attention, and the first, third, ... of its products."""
    products = 0

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal products
        if "attention" in str(operator):
            return CheckpointPolicy.MUST_SAVE
        products += operator is torch.ops.aten.mm.default
        saves = operator is torch.ops.aten.mm.default and products % 2 == 1
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


if __name__ == "__main__":
    main()
