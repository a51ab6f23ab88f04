"""Training runs that others published, as data: what ran, on which machine, and what its authors measured.

Each source is a table of its own, and rows of one table that differ in one thing alone tell most. A row that cannot be
forecast is in ``LEFT``, with the reason. Tokens per second are those of one GPU. Nothing here is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from zerograph.core.machine import GB, PRESETS, Link, Machine

Again = Literal["none", "auto", "op", "layer", "full"]
"""Which activations are computed again: none at all, those that a compiler fuses, every second product ("op"), every
other layer ("layer"), or every layer."""
Unit = Literal["tok/s", "TFLOP/s", "s"]
Memory = Literal["", "allocated", "reserved"]
"""The number of torch's allocator that was published: what tensors took, or what it took from the device for them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One published run.

    Attributes:
        source: a key of :data:`SOURCES`.
        model: a key of ``published.MODELS``.
        machine: a key of :data:`MACHINES`.
        world, replicas: ranks that split a parameter, and ranks that hold the same part.
        batch, seq: of one micro-batch of one rank; a step has ``accumulate`` of them, each gathered and reduced.
        figure, unit: what was published; 0 where only memory was.
        gib, memory: GiB, and which number of the allocator it is.
        options: further arguments of ``plan_file``.
        note: how its authors ran it, where that is no argument of a plan.
    """

    source: str
    model: str
    machine: str
    world: int
    batch: int
    seq: int
    again: Again
    figure: float = 0.0
    unit: Unit = "tok/s"
    accumulate: int = 1
    replicas: int = 1
    gib: float = 0.0
    memory: Memory = ""
    options: tuple[tuple[str, Any], ...] = ()
    note: str = field(default="", compare=False)

    @property
    def gpus(self) -> int:
        return self.world * self.replicas

    @property
    def what(self) -> str:
        """The run in a few words, without its ranks."""
        passes = f" x {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.model}, {self.batch} x {self.seq}{passes}, {self.again}"


@dataclass(frozen=True, slots=True)
class Left:
    """Rows of a source that no forecast is made for."""

    source: str
    rows: str
    why: str


SOURCES = {
    "llm-foundry": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md at c90b9b3",
    "torchtitan": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md; docs/performance.md, June 2024",
    "Megatron": "Narayanan et al., SC'21 (arXiv 2104.04473), table 2: ZeRO-3 without model parallelism",
    "fms-fsdp": "foundation-model-stack/fms-fsdp, README.md",
    "litgpt": "Lightning-AI/litgpt, tutorials/resource-tables.md and config_hub/finetune/README.md",
    "thunder": "Lightning-AI/lightning-thunder, pull request 940",
    "issues": "pytorch/pytorch#184225 and NVIDIA-NeMo/Megatron-Bridge#3880",
    "DeepSpeed": "ZeRO-Offload (arXiv 2101.06840) and ZeRO-Infinity (arXiv 2104.07857)",
}


def _limited_h100() -> Machine:
    """torchtitan's H100: 96 GB of HBM2e at 2.4 TB/s, and 500 W in place of 700.

    Its authors put its peak between those of the SXM (989 T at 700 W) and the NVL (835 T at 400 W; NVIDIA's data
    sheet): by power that is 886.
    """
    sxm = PRESETS["h100-80gb"]
    peak = (835 + (989 - 835) * (500 - 400) / (700 - 400)) / 989
    return replace(
        sxm,
        device_memory=96 * GB,
        device_bandwidth=sxm.device_bandwidth * 2.4 / 3.35,
        matmul={dtype: rate * peak for dtype, rate in sxm.matmul.items()},
    )


def _with_network(preset: str, rate: float) -> Machine:
    """The preset between whose nodes ``rate`` bytes per second go: 0.8 of that, as presets have it."""
    machine = PRESETS[preset]
    return replace(machine, inter=Link(0.8 * rate, machine.inter.latency))


MACHINES = {
    "A100": PRESETS["a100-80gb"],  # 1,600 Gb/s per node: llm-foundry and Megatron (8 HDR adapters)
    "A100-40": PRESETS["a100-40gb"],
    "H100": PRESETS["h100-80gb"],
    "H100, 500 W": _limited_h100(),
    "A100, 400 Gb/s": _with_network("a100-80gb", 50 * GB),
    "H100, 800 Gb/s": _with_network("h100-80gb", 100 * GB),
    "V100": PRESETS["v100-32gb-dgx2"],
}
ONE_ADAPTER = "A100, 1 of 8 HDR"
"""Megatron's A100 where a collective goes through one of a node's adapters: steps of ZeRO-3 there last about as long as
that takes, whatever the number of GPUs."""
MACHINES[ONE_ADAPTER] = _with_network("a100-80gb", 25 * GB)


def _foundry(
    model: str, machine: str, batch: int, again: Again, tokens: dict[int, float], *, seq: int = 2048,
    accumulate: int = 1, **options: Any,
) -> Iterator[Run]:  # fmt: skip
    """Rows of llm-foundry that differ in the number of GPUs: FSDP over all of them."""
    for world, figure in tokens.items():
        yield Run(
            "llm-foundry", f"mpt-{model}", machine, world, batch, seq, again, figure, accumulate=accumulate,
            options=tuple(options.items()),
        )  # fmt: skip


def _megatron(model: str, rows: dict[int, tuple[int, float]]) -> Iterator[Run]:
    """ZeRO-3 at one global batch, by GPUs: sequences of each and TFLOP/s."""
    # Each linear layer is a module of its own, which ZeRO-3 gathers by itself.
    options = (("dtype", "float16"), ("reduce_dtype", "float16"), ("by_module", True))
    for world, (batch, figure) in rows.items():
        yield Run("Megatron", model, "A100", world, batch, 2048, "full", figure, "TFLOP/s", options=options)


def _fms(
    model: str, machine: str, batch: int, again: Again, rows: dict[tuple[int, int], float], note: str = ""
) -> Iterator[Run]:
    """By ranks that split a parameter and their replicas: tokens per second, of gradients reduced in bfloat16."""
    for (world, replicas), figure in rows.items():
        run = Run("fms-fsdp", model, machine, world, batch, 4096, again, figure, replicas=replicas, note=note)
        yield replace(run, options=tuple(_PURE.items()))


def _litgpt(model: str, seq: int, peaks: dict[int, float]) -> Iterator[Run]:
    """LoRA on one A100 with the longest sequence of its data, by sequences: GB (of 10**9 bytes)."""
    plain = Run("litgpt", model, "A100-40", 1, 1, seq, "none", memory="allocated", options=(("stage", 0),))
    for batch, gb in peaks.items():
        yield replace(plain, batch=batch, gib=gb * GB / 2**30)


# Precision "bf16 PURE" reduces gradients in bfloat16, "amp_bf16 DEFAULT" in float32.
_PURE = {"reduce_dtype": "bfloat16"}
_KEPT = {"stage": 2}
"""SHARD_GRAD_OP: parameters stay unsharded from forward to backward."""

RUNS: tuple[Run, ...] = (
    *_foundry("70b", "H100", 8, "full", {512: 1007, 256: 1035, 128: 1058}),
    *_foundry("70b", "H100", 8, "full", {64: 1039}, accumulate=4),
    *_foundry("70b", "H100", 2, "full", {32: 882}, accumulate=16),
    *_foundry("30b", "H100", 8, "full", {512: 2115, 256: 2148, 128: 2199}),
    *_foundry("30b", "H100", 14, "full", {32: 2308}, accumulate=3),
    *_foundry("30b", "H100", 3, "full", {8: 2002}, accumulate=21),
    *_foundry("13b", "H100", 16, "full", {512: 4952, 256: 4989, 128: 5080}),
    *_foundry("13b", "H100", 2, "auto", {8: 4792}),
    *_foundry("7b", "H100", 6, "auto", {512: 9670, 256: 10119, 128: 10475, 8: 10643}),
    *_foundry("7b", "H100", 16, "full", {8: 8611}, seq=4096, accumulate=2),
    *_foundry("7b", "H100", 8, "full", {8: 6935}, seq=8192, accumulate=2),
    *_foundry("7b", "H100", 2, "full", {8: 3318}, seq=32768, accumulate=2),
    *_foundry("7b", "H100", 1, "full", {8: 1956}, seq=65536, accumulate=2),
    *_foundry("3b", "H100", 8, "auto", {512: 21664, 256: 22772, 128: 23422}, **_KEPT),
    *_foundry("1b", "H100", 12, "auto", {512: 39837, 256: 42555, 128: 44123}, **_KEPT),
    *_foundry("70b", "A100", 8, "full", {64: 410}, accumulate=4, **_PURE),
    *_foundry("70b", "A100", 2, "full", {32: 373}, accumulate=16, **_PURE),
    *_foundry("30b", "A100", 3, "full", {8: 916}, accumulate=21),
    *_foundry("13b", "A100", 2, "auto", {8: 2262}, accumulate=3),
    *_foundry("7b", "A100", 6, "auto", {8: 4641}, accumulate=2),
    *_foundry("70b", "A100-40", 4, "full", {128: 376}, **_PURE),
    *_foundry("70b", "A100-40", 2, "full", {64: 276}, **_PURE),
    *_foundry("30b", "A100-40", 6, "full", {128: 865}, **_PURE),
    *_foundry("13b", "A100-40", 16, "full", {128: 1972, 64: 1976}, **_PURE),
    *_foundry("13b", "A100-40", 14, "full", {32: 1998}, **_PURE),
    *_foundry("13b", "A100-40", 10, "full", {16: 1993}, **_PURE),
    *_foundry("13b", "A100-40", 4, "full", {8: 1668}, accumulate=16, **_PURE),
    *_foundry("7b", "A100-40", 18, "full", {128: 3623, 64: 3665, 32: 3725}, **_PURE),
    *_foundry("7b", "A100-40", 16, "full", {16: 3645}, **_PURE),
    *_foundry("7b", "A100-40", 12, "full", {8: 3679}, accumulate=4, **_PURE),
    Run("torchtitan", "llama-3.1-8b", "H100, 500 W", 8, 2, 8192, "op", 6667, gib=77.0, memory="reserved"),
    Run("torchtitan", "llama-3.1-8b", "H100, 500 W", 128, 2, 8192, "op", 6514, gib=62.0, memory="reserved"),
    Run("torchtitan", "llama-3-8b", "A100", 64, 1, 8192, "layer", 2904),
    Run("torchtitan", "llama-3-8b", "A100", 64, 1, 8192, "op", 2973),
    Run("torchtitan", "llama-3-70b", "A100", 64, 1, 8192, "full", 331),
    Run("torchtitan", "llama-2-13b", "A100", 64, 2, 4096, "auto", 2162),
    Run("torchtitan", "llama-2-13b", "A100", 64, 2, 4096, "layer", 1914),
    Run("torchtitan", "llama-2-13b", "A100", 64, 2, 4096, "op", 1904),
    Run("torchtitan", "llama-2-70b", "A100", 64, 1, 4096, "op", 355),
    Run("torchtitan", "llama-2-70b", "A100", 64, 2, 4096, "full", 353),
    *_megatron("gpt-175b", {384: (4, 144), 768: (2, 88), 1536: (1, 44)}),
    *_megatron("gpt-530b", {640: (4, 138), 1120: (2, 98), 2240: (1, 48)}),
    *_fms("llama-2-7b", "A100, 400 Gb/s", 2, "auto", {(8, 16): 3700}),
    *_fms("llama-2-7b", "H100, 800 Gb/s", 2, "auto", {(8, 12): 7500}),
    *_fms("llama-34b", "A100, 400 Gb/s", 2, "full", {(128, 1): 700}),
    *_fms("llama-34b", "H100, 800 Gb/s", 2, "full", {(96, 1): 1550}),
    *_fms("llama-2-7b", "A100, 400 Gb/s", 2, "auto", {(8, 16): 3760}, "older"),
    *_fms("llama-2-13b", "A100, 400 Gb/s", 1, "auto", {(8, 16): 1700}, "older"),
    *_fms("llama-34b", "A100, 400 Gb/s", 8, "full", {(128, 1): 772}, "older"),
    *_fms("llama-2-70b", "A100, 400 Gb/s", 6, "full", {(128, 1): 380}, "older"),
    *_litgpt("phi-1.5, LoRA", 1044, {1: 4.82, 2: 6.76, 4: 10.68}),
    *_litgpt("stablelm-3b, LoRA", 1034, {1: 9.69, 2: 12.10, 4: 16.92}),
    *_litgpt("llama-2-7b, LoRA", 1304, {1: 21.30, 2: 29.07}),
    *_litgpt("llama-2-13b, LoRA", 1304, {1: 38.12}),
    replace(
        Run("thunder", "llama-2-7b, bf16", "H100", 8, 1, 4096, "auto", 11856, options=(("stage", 2), *_PURE.items())),
        gib=40.21 * GB / 2**30,
        memory="allocated",
    ),
)

OUT_OF_MEMORY: tuple[Run, ...] = (
    *_litgpt("llama-2-7b, LoRA", 1304, {4: 0.0}),
    *_litgpt("llama-2-13b, LoRA", 1304, {2: 0.0, 4: 0.0}),
)
"""Runs that did not fit: litgpt's on an A100 of 40 GB."""

CPU_ADAM = {1: 0.22, 2: 0.51, 4: 1.03, 8: 2.41, 10: 2.57}
"""Seconds of one update by DeepSpeed's CPU-Adam on a DGX-2, by billions of parameters (ZeRO-Offload, table 4)."""
GPU_ADAM = {1: 0.10, 2: 0.26, 4: 0.64, 8: 0.87, 10: 1.00}
"""Seconds of torch's Adam on V100s there. No GPU holds 10 billion parameters: how they were timed is not told."""

LEFT: tuple[Left, ...] = (
    Left("torchtitan", "8B uncompiled: 5,762 and 5,605 tokens/s, 82.4 and 67.0 GiB", "eager kernels: nothing fused"),
    Left("torchtitan", "8B and H200 with float8: 8,532, 8,380, 10,938, 10,753 tokens/s", "float8 products"),
    Left("torchtitan", "8B over 32k to 256k tokens: 3,890 to 548 tokens/s", "context parallel, and float8"),
    Left("torchtitan", "70B and 405B on 256 and 512 GPUs", "tensor and pipeline parallel"),
    Left("fms-fsdp", "13b, batch 2: 1,800 and 3,800 tokens/s", "selective recomputation, of an unpublished share"),
    Left("litgpt", "nf4: 7B 14.14, 13B 23.14 GB", "4-bit weights"),
    Left("litgpt", "2 A100, 7B: 22.18, 22.47, 23.39 GB", "FSDP1's flat parameters have gradients of frozen weights"),
    Left("litgpt", "Llama-3.2-1B and 3B in full: 8.70 and 16.51 GB", "fewer bytes than 8 per parameter: no AdamW's"),
    Left("litgpt", "gemma-2b in full on 4 A10G: 17.43 GB", "how it was sharded is not told"),
    Left("thunder", "eager 9,325 tokens/s, 47.45 GB", "eager kernels: nothing fused"),
    Left("torchtitan", "pull request 4636: peaks by budget, 68.56 to 91.43 GiB", "model, batch and ranks are not told"),
    Left("issues", "pytorch: 24.7, 30.2, 48.0 GB at batch 1, 2, 4", "the model is not told"),
    Left("issues", "Megatron-Bridge: 30B-A3B on 16 H100, 42.21 s, 61.35 GB", "expert parallel"),
    Left("DeepSpeed", "torch's CPU Adam: 1.39 to 14.00 s", "no program here runs it"),
    Left("DeepSpeed", "37 to 50 TFLOP/s from 400B to 20T; about 30 for 13B to 70B", "batches and widths are not told"),
)
