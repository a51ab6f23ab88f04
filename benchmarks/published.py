"""Forecasts against training runs that others published: seconds and memory of transformers on GPUs.

    python benchmarks/published.py                        # every row; 10 to 20 minutes on one core, no GPU
    python benchmarks/published.py --sources thunder,DeepSpeed

Asked. Memory within 5% and seconds within 20%, each on 80% of the rows; how a figure changes with ranks or lengths,
where nothing else changes, within 10%.

Method. `published_runs.py` has the runs, what is known of them, and which are left out and why. Each is planned as its
authors describe it: their model's sizes, one block per bucket, the next one gathered ahead, 16-bit compute over fp32
parameters unless the run says otherwise, gradients summed in fp32, and their recomputation: "full" and every other
layer ("layer") by `recompute`, "op" (attention and every second product saved) by `torch.utils.checkpoint` with their
rule. Nothing is fitted: machines are presets with what the authors say of theirs. A model is traced once for all the
numbers of ranks that it ran on: their parameters are split otherwise, and the programs are the same.

Assumed, as the reports do not say it: that segments are compiled, though most of these runs were not. The loss of
torchtitan's Llama 3, and of every Llama 2 70B, was not: it runs beside the forecast's programs, between forward and
backward, and holds three copies of the logits in fp32 (their logarithms, and the gradients of these and of the logits)
where it needs most, beside the parameters that FSDP2 leaves whole from forward to backward: the last block and what is
in none.

Memory. litgpt and thunder print the most that tensors took, which is a forecast's peak. torchtitan prints what torch's
allocator took from the device for them. That is also what is free where nothing can use it: the reduced gradients,
which have a stream of their own, while the loss runs, the 16-bit logits, which are too small for the fp32 tensors that
follow, and fragments, for which plans leave a share free (`RESERVE`). None counts the driver's context or NCCL's
buffers, which are outside of the allocator.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from facts import append_json
from model import Block
from published_runs import CPU_ADAM, GPU_ADAM, LEFT, MACHINES, ONE_ADAPTER, OUT_OF_MEMORY, RUNS, SOURCES, Run
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zerograph.core.machine import GB, Machine
from zerograph.core.plan import Plan
from zerograph.core.step import Param
from zerograph.core.timeline import Forecast
from zerograph.dryrun.compile_only import Compiled, compile_only
from zerograph.dryrun.forecast import forecast_file
from zerograph.planner.estimate.estimate import RESERVE, Question, estimate_rows, fastest
from zerograph.planner.estimate.sizes import ModelSize
from zerograph.planner.estimate.training import Training
from zerograph.sim.rates import Rates

LOSS_MOVES = (2 + 4) + (4 + 4) + 4 + (4 + 4 + 4) + (4 + 2)
"""Bytes that a loss which is not compiled reads and writes of each logit: cast, logarithm, its gradient made, passed
on, and cast back."""
RECOMPUTE = {"none": "none", "auto": "auto", "op": "auto", "layer": 0.5, "full": "full"}
ADAM_BYTES = 28
"""Bytes of each parameter that an fp32 update reads (parameter, gradient, two moments) and writes (all but one)."""


class Gpt(nn.Module):
    """MPT, and Megatron's GPT: biases everywhere, and an embedding and a head that share their weight."""

    def __init__(self, layers: int, dim: int, heads: int, vocab: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class Scored(nn.Module):
    """One of transformers' models with litgpt's loss, which casts no logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(input_ids=input_ids).logits.flatten(0, 1), labels.flatten())


class Adapted(nn.Module):
    """LoRA of rank 8 beside a frozen linear layer, with litgpt's dropout."""

    def __init__(self, linear: nn.Linear, ranks: int = 8) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, ranks, bias=False, dtype=linear.weight.dtype)
        self.up = nn.Linear(ranks, linear.out_features, bias=False, dtype=linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + 2 * self.up(self.down(F.dropout(x, 0.05, self.training)))


@dataclass(frozen=True, slots=True)
class Model:
    """A model by its sizes: a GPT, or one of transformers' (``family``), with grouped queries and a gated MLP or not.

    Attributes:
        dtype: of its parameters.
        adapts: names of the linear layers that LoRA adapts; then all else is frozen.
        loss: whether the loss is compiled with the model. It is litgpt's where parameters have 16 bit.
    """

    layers: int
    dim: int
    heads: int
    vocab: int
    inner: int = 0
    kv_heads: int = 0
    family: str = "gpt"
    dtype: torch.dtype = torch.float32
    adapts: tuple[str, ...] = ()
    loss: bool = True

    def make(self, run: Run) -> tuple[nn.Module, dict[str, Any]]:
        """The model and its inputs, on the default device."""
        if self.family == "gpt":
            model: nn.Module = Gpt(self.layers, self.dim, self.heads, self.vocab, run.seq)
        else:
            model = self._of_transformers()
        model = model.to(self.dtype).train()
        if self.dtype == torch.bfloat16:
            model = Scored(model)
        if self.adapts:
            self._adapt(model)
        if run.again == "op":
            for layer in model.model.layers:
                layer.forward = functools.partial(
                    checkpoint, layer.forward, use_reentrant=False, context_fn=_save_operators
                )
        ids = torch.zeros(run.batch, run.seq, dtype=torch.int64)
        return model, {"input_ids": ids, "labels": ids} if self.loss else {"input_ids": ids}

    def _of_transformers(self) -> nn.Module:
        import transformers

        sizes = {
            "hidden_size": self.dim, "intermediate_size": self.inner, "vocab_size": self.vocab, "use_cache": False,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "max_position_embeddings": 8192,
        }  # fmt: skip
        match self.family:
            case "llama":
                config = transformers.LlamaConfig(**sizes, num_key_value_heads=self.kv_heads or self.heads)
                return transformers.LlamaForCausalLM(config)
            case "phi":
                # One operator, as in litgpt; the default writes it out in seven.
                config = transformers.PhiConfig(**sizes, hidden_act="gelu_pytorch_tanh")
                return transformers.PhiForCausalLM(config)
            case "neox":
                return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))
        raise ValueError(f"no family {self.family!r}")

    def _adapt(self, model: nn.Module) -> None:
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if name in self.adapts and isinstance(child, nn.Linear):
                    # One layer for queries, keys and values has the ranks of two adapted ones.
                    setattr(module, name, Adapted(child, 16 if len(self.adapts) == 1 else 8))


LLAMA_8B = Model(32, 4096, 32, 128256, 14336, 8, "llama", loss=False)
LLAMA_70B = Model(80, 8192, 64, 128256, 28672, 8, "llama", loss=False)
LLAMA_2_7B = Model(32, 4096, 32, 32000, 11008, 32, "llama")
LLAMA_2_13B = Model(40, 5120, 40, 32000, 13824, 40, "llama")
LLAMA_2_70B = replace(LLAMA_70B, vocab=32000)
LORA: dict[str, Any] = {"dtype": torch.bfloat16, "adapts": ("q_proj", "v_proj")}
MODELS: Mapping[str, Model] = {
    "mpt-1b": Model(24, 2048, 16, 50368),
    "mpt-3b": Model(32, 2560, 20, 50368),
    "mpt-7b": Model(32, 4096, 32, 50368),
    "mpt-13b": Model(40, 5120, 40, 50368),
    "mpt-30b": Model(48, 7168, 56, 50368),
    "mpt-70b": Model(80, 8192, 64, 50368),
    "gpt-175b": Model(96, 12288, 96, 51200),
    "gpt-530b": Model(105, 20480, 128, 51200),
    "llama-3.1-8b": LLAMA_8B,
    "llama-3-8b": LLAMA_8B,
    "llama-3-70b": LLAMA_70B,
    "llama-2-7b": LLAMA_2_7B,
    "llama-2-13b": LLAMA_2_13B,
    "llama-2-70b": LLAMA_2_70B,
    "llama-34b": Model(48, 8192, 64, 32000, 22016, 8, "llama"),
    "llama-2-7b, bf16": replace(LLAMA_2_7B, dtype=torch.bfloat16),
    "llama-2-7b, LoRA": replace(LLAMA_2_7B, **LORA),
    "llama-2-13b, LoRA": replace(LLAMA_2_13B, **LORA),
    "phi-1.5, LoRA": Model(24, 2048, 32, 51200, 8192, family="phi", **LORA),
    "stablelm-3b, LoRA": Model(
        16, 4096, 32, 50688, 16384, family="neox", dtype=torch.bfloat16, adapts=("query_key_value",)
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What is published of a run and what is forecast: a figure in ``unit``, and GiB; 0 where there is none.

    Attributes:
        run: of a row that has one.
    """

    source: str
    what: str
    machine: str
    gpus: int
    published: float
    found: float
    unit: str
    gib: float = 0.0
    found_gib: float = 0.0
    run: Run | None = None

    @property
    def seconds(self) -> float:
        """Seconds forecast over seconds published; 0 where none are published."""
        if not self.published:
            return 0.0
        ratio = self.found / self.published
        return ratio if self.unit == "s" else 1 / ratio

    @property
    def memory(self) -> float:
        """Memory forecast over memory published; 0 where none is published."""
        return self.found_gib / self.gib if self.gib else 0.0


def main() -> None:
    args = arguments()
    console, rows = Console(width=138), list[Row]()
    for source in args.sources:
        found = list(deepspeed_rows() if source == "DeepSpeed" else (row(run) for run in RUNS if run.source == source))
        if found:
            console.print(table(source, found))
        rows += found
        if source == "Megatron":
            # Not counted below: the rate is known from these rows' seconds alone.
            slower = [row(replace(run, machine=ONE_ADAPTER)) for run in RUNS if run.source == source]
            console.print(table("Megatron", slower))
    if "litgpt" in args.sources:
        for run in OUT_OF_MEMORY:
            print(f"{run.what} ran out of {MACHINES[run.machine].device_memory / 2**30:.0f} GiB: {_memory(run):.1f}")
    for text in summary(rows):
        print(text)
    for left in LEFT:
        if left.source in args.sources:
            print(f"left out, {left.source}: {left.rows} ({left.why})")
    if args.json:
        for one in rows:
            shares = {"seconds": one.seconds, "memory": one.memory}
            record = {"source": one.source, "run": one.what, "machine": one.machine, "gpus": one.gpus, **shares}
            append_json(args.json, {"benchmark": "published", **record})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=lambda text: text.split(","), default=list(SOURCES), help=", ".join(SOURCES))
    parser.add_argument("--json", type=Path, help="append results to this JSON Lines file")
    return parser.parse_args()


def row(run: Run) -> Row:
    """A run beside its forecast."""
    seconds = _seconds(run)
    found = run.batch * run.seq * run.accumulate / seconds
    if run.unit == "TFLOP/s":
        found = megatron_flops(MODELS[run.model], run) / seconds / 1e12
    figures = run.figure, found, run.unit, run.gib, _memory(run)
    return Row(run.source, run.what, run.machine, run.gpus, *figures, run)


def table(source: str, rows: Sequence[Row]) -> Table:
    found = Table(title=f"{source} ({SOURCES[source]})", title_justify="left")
    for column in ("run", "GPUs", "figure", "forecast", "seconds", "GiB", "forecast", "memory"):
        found.add_column(column, justify="left" if column in ("run", "GPUs") else "right")
    for one in rows:
        figures = (
            f"{one.published:g} {one.unit}" if one.published else "",
            f"{one.found:.4g}" if one.published else "",
        )
        seconds = f"{one.seconds:.2f}" if one.published else ""
        memory = (f"{one.gib:.1f}" if one.gib else "", f"{one.found_gib:.1f}" if one.found_gib else "")
        share = f"{one.memory:.2f}" if one.gib else ""
        found.add_row(one.what, f"{one.gpus} {one.machine}", *figures, seconds, *memory, share)
    return found


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """What is asked of all rows, and what came: one line each."""
    for what, asked, ratios in (
        ("seconds", 0.2, [one.seconds for one in rows if one.published]),
        ("memory", 0.05, [one.memory for one in rows if one.gib]),
    ):
        if ratios:
            within = sum(abs(ratio - 1) <= asked for ratio in ratios)
            yield f"{what} within {asked:.0%}: {within} of {len(ratios)} rows, {within / len(ratios):.0%} (80% asked)"
    changes = list(slopes(rows))
    if changes:
        within = sum(abs(ratio - 1) <= 0.1 for _, ratio in changes)
        yield f"changes with ranks or lengths within 10%: {within} of {len(changes)}"
        yield from (f"  {name}: {ratio:.2f}" for name, ratio in changes)


def slopes(rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    """By how much seconds change with ranks or with lengths where nothing else does, forecast over published: from the
    first row of a group to each."""
    timed = [(one, one.run) for one in rows if one.run is not None and one.published]
    ranks = [(replace(run, world=0, figure=0.0, gib=0.0), run.gpus, one) for one, run in timed]
    # As many tokens, in sequences of another length.
    lengths = [(replace(run, batch=run.batch * run.seq, seq=0, figure=0.0), run.seq, one) for one, run in timed]
    for what, found in (("GPUs", ranks), ("tokens", lengths)):
        groups: dict[Run, list[tuple[int, Row]]] = {}
        for key, at, one in found:
            groups.setdefault(key, []).append((at, one))
        for group in groups.values():
            (start, first), *others = sorted(group, key=lambda pair: pair[0])
            for at, one in others:
                if at != start:
                    yield f"{first.what} on {one.machine}, {start} to {at} {what}", one.seconds / first.seconds


def megatron_flops(model: Model, run: Run) -> float:
    """Operations of one micro-batch of one rank, as Narayanan et al. count them: with recomputation (equation 3)."""
    layers, dim, seq = model.layers, model.dim, run.seq
    shares = 1 + seq / (6 * dim) + model.vocab / (16 * layers * dim)
    return 96 * run.batch * seq * layers * dim**2 * shares


def _seconds(run: Run) -> float:
    """Seconds of a step: its micro-batches, and one update."""
    found, machine = _forecast(run), MACHINES[run.machine]
    passes = max((span.end for span in found.spans if span.phase in ("forward", "backward")), default=0.0)
    if not MODELS[run.model].loss:
        passes += LOSS_MOVES * run.batch * run.seq * MODELS[run.model].vocab / machine.device_bandwidth
    update = sum(span.end - span.start for span in found.spans if span.phase == "update")
    return run.accumulate * passes + update


def _memory(run: Run) -> float:
    """GiB that the run takes, as the number that was published counts them."""
    model, found = MODELS[run.model], _forecast(run)
    peak, reserved = found.peaks["device"].bytes, run.memory == "reserved"
    if not model.loss:
        peak = max(peak, _loss_peak(run, model, found))
    if reserved:
        # FSDP2 allocates reduced gradients on a stream of its own, and other streams get nothing of what is free there.
        peak += 4 * _sizes(run.model)[1] // run.world
        # The logits in 16 bit are freed before the peak, and too small for any of the tensors that follow.
        peak += 2 * run.batch * run.seq * model.vocab
    return peak / (1 - RESERVE if reserved else 1) / 2**30


def _loss_peak(run: Run, model: Model, found: Forecast) -> int:
    """Bytes while a loss that is not compiled runs, between forward and backward."""
    block, everything = _sizes(run.model)
    logits = run.batch * run.seq * model.vocab
    backward = next(span.start for span in found.spans if span.phase == "backward")
    saved = next(level for time, level in reversed(found.memory["device"]) if time < backward)
    kept = 2 * (everything - (model.layers - 1) * block)
    # The logits themselves are freed before the backward of the loss begins.
    return saved - 2 * logits + 3 * 4 * logits + kept


@functools.cache
def _sizes(name: str) -> tuple[int, int]:
    """Parameters of a block, and of the whole model."""
    with torch.device("meta"):
        model, _ = MODELS[name].make(RUNS[0])
    blocks = model.blocks if isinstance(model, Gpt) else _blocks(model)
    block, everything = (sum(p.numel() for p in part.parameters()) for part in (blocks[0], model))
    return block, everything


def _blocks(model: nn.Module) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


@functools.cache
def _forecast(run: Run) -> Forecast:
    """The forecast of one micro-batch and the update."""
    machine, traced = MACHINES[run.machine], _traced(_key(run))
    traced.frame.plan = _over(traced.frame.plan, run.world, run.replicas)
    return forecast_file(run.model, traced, machine).forecast


def _over(plan: Plan, ranks: int, replicas: int) -> Plan:
    """The same plan with its parameters over so many ranks."""

    def laid(params: Iterable[Param]) -> tuple[Param, ...]:
        return tuple(replace(p, home=p.home.over(ranks)) for p in params)

    buckets = tuple(replace(bucket, params=laid(bucket.params)) for bucket in plan.buckets)
    return replace(plan, world_size=ranks, replicas=replicas, buckets=buckets)


def _key(run: Run) -> Run:
    """What of a run its programs depend on. The first number of ranks stands for all."""
    alike = next(
        one for one in (*RUNS, *OUT_OF_MEMORY)
        if _but_ranks(one) == _but_ranks(run) and (one.world == 1) == (run.world == 1)
    )  # fmt: skip
    return replace(alike, source="", machine="", figure=0.0, gib=0.0, memory="", accumulate=1)


def _but_ranks(run: Run) -> tuple[Any, ...]:
    return run.model, run.batch, run.seq, run.again, run.options, run.replicas > 1


@functools.cache
def _traced(run: Run) -> Compiled:
    options = {"dtype": "bfloat16", "stage": 3, **dict(run.options)}
    block, _ = _sizes(run.model)
    # ZeRO-3 gathers each module by itself, and the largest matrix of a GPT's block is a third of it.
    bucket = 2 * block // 3 if options.pop("by_module", False) else 2 * block
    for name in ("dtype", "reduce_dtype"):
        if options.get(name) is not None:
            options[name] = getattr(torch, options[name])
    return compile_only(
        lambda: MODELS[run.model].make(run), world_size=run.world, replicas=run.replicas, bucket_size=bucket,
        prefetch=1, recompute=RECOMPUTE[run.again], **options,
    )  # fmt: skip


def deepspeed_rows() -> Iterator[Row]:
    """Updates by Adam on a host and on a GPU, and two steps of ``zerograph estimate``."""
    machine = MACHINES["V100"]
    rates = Rates(machine, 1, "float16")
    for billions, seconds in CPU_ADAM.items():
        found = rates.host_update(ADAM_BYTES * billions * GB, 1)
        yield Row("DeepSpeed", f"CPU-Adam, {billions}B parameters", "V100 host", 1, seconds, found, "s")
    for billions, seconds in GPU_ADAM.items():
        found = machine.update.seconds(ADAM_BYTES * billions * GB)
        yield Row("DeepSpeed", f"torch's Adam, {billions}B parameters", "V100", 1, seconds, found, "s")
    training = Training(batch=8, seq=1024, dtype="float16", optimizer="mixed", attention="whole")
    for what, size, gpus, offload, accumulate, published in (
        ("ZeRO-Offload, 10B", ModelSize.of(layers=50, hidden=4096, heads=32), 1, "gradients", 64, 40),
        ("ZeRO-Infinity, 1T", ModelSize.of(layers=128, hidden=25600, heads=256), 512, "parameters", 1, 49),
    ):
        asked = replace(training, accumulate=accumulate)
        found = estimated(size, asked, machine, gpus, offload)
        yield Row("DeepSpeed", what, "V100", gpus, published, found, "TFLOP/s")


def estimated(size: ModelSize, training: Training, machine: Machine, gpus: int, offload: Any) -> float:
    """TFLOP/s per GPU of the fastest step that ``zerograph estimate`` finds, by Megatron's count of operations."""
    best = fastest(estimate_rows(Question(size, training, machine, gpus, offload=offload)))
    if best is None:
        return float("nan")
    # Four passes: forward, recomputation, and a backward of two.
    flops = 4 * 2 * training.tokens * training.accumulate
    return flops * (size.parameters + 2 * size.layers * size.hidden * training.seq) / best.outcome.seconds / 1e12


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
