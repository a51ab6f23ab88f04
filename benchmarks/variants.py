"""Every way of training the benchmark's GPT that is compared: what wraps the model, and what one step of it is.

A variant is named as `ddp` or, with options, as `zg3:bucket_size=8MiB:prefetch=2`; options are the keyword arguments
of whatever the variant wraps the model in (`DistributedDataParallel`, `fully_shard`, `torch.compile`,
`zerograph.backend`, DeepSpeed's "zero_optimization"). All use the same `torch.optim.AdamW`. With `loop=8` any of them
accumulates the gradients of eight parts of the batch, one `backward()` after another.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from model import GPT, Workload, blocks_of
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Options = dict[str, Any]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
LEARNING_RATE = 3e-4


@dataclass(slots=True)
class Trainer:
    """The four parts of a training step, as the loop of a user calls them."""

    forward: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    backend: Any = None  # zerograph's, for its report

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def gradient_norm(self) -> float:
        """NaN where the backward has used gradients up."""
        if getattr(self.optimizer, "overlap", False) is True:
            return float("nan")
        return gradient_norm(group_parameters(self.optimizer))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(slots=True)
class DeepSpeedTrainer(Trainer):
    engine: Any = None

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def gradient_norm(self) -> float:
        """NaN: DeepSpeed knows its norm only after the update."""
        return float("nan")

    def update(self) -> None:
        self.engine.step()


@dataclass(frozen=True, slots=True)
class Variant:
    title: str
    build: Callable[[GPT, Workload, Options], Trainer]
    group: bool = True  # needs a process group even at world size 1
    module: str = "torch"  # what must be installed


def eager(model: GPT, work: Workload, options: Options) -> Trainer:
    return Trainer(autocast(model, work), adamw(model))


def compiled(model: GPT, work: Workload, options: Options) -> Trainer:
    model.compile(**options)
    return eager(model, work, {})


def checkpointed(wrap: Callable[[GPT, Workload, Options], Trainer]) -> Callable[[GPT, Workload, Options], Trainer]:
    """What `wrap` makes of a model whose every block runs under `torch.utils.checkpoint`, as torchtitan wraps it."""

    def build(model: GPT, work: Workload, options: Options) -> Trainer:
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        blocks = blocks_of(model)
        for index, block in enumerate(blocks):
            blocks[index] = checkpoint_wrapper(block)
        return wrap(model, work, options)

    return build


def chunking_compiler(model: GPT, work: Workload, options: Options) -> Trainer:
    """Inductor's own pass that cuts the loss into chunks (torch 2.13)."""
    model.compile(options={"auto_chunker.enable": True, **options})
    return eager(model, work, {})


class LinearCrossEntropy(torch.autograd.Function):
    """Liger's linear cross-entropy, in plain torch: the forward makes the gradients too, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        # As many chunks as the vocabulary is wider than the model, each a power of two of tokens.
        size = 2 ** math.ceil(math.log2(-(-x.shape[0] // -(-weight.shape[0] // x.shape[1]))))
        loss, of_x, of_weight = x.new_zeros(()), torch.empty_like(x), torch.zeros_like(weight)
        for part, wanted, out in zip(x.split(size), targets.split(size), of_x.split(size), strict=True):
            logits = part @ weight.t()
            found = logits.log_softmax(-1)
            loss -= found.gather(1, wanted[:, None]).sum()
            grad = found.exp_()
            grad[torch.arange(len(wanted)), wanted] -= 1
            grad /= x.shape[0]
            torch.mm(grad, weight, out=out)
            of_weight.addmm_(grad.t(), part)
        ctx.save_for_backward(of_x, of_weight)
        return loss / x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        of_x, of_weight = ctx.saved_tensors
        return grad * of_x, of_weight.mul_(grad), None


def chunked(model: GPT, work: Workload, options: Options) -> Trainer:
    """`torch.compile` of all but head and loss, which are Liger's."""
    trunk = torch.compile(model.trunk)

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        return LinearCrossEntropy.apply(trunk(tokens).flatten(0, 1), model.head.weight, targets.flatten())

    return Trainer(forward, adamw(model))


def ddp(model: GPT, work: Workload, options: Options) -> Trainer:
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    return Trainer(autocast(wrapped, work), adamw(wrapped))


def compiled_ddp(model: GPT, work: Workload, options: Options) -> Trainer:
    """`torch.compile` around the wrapper, which splits the graph at DDP's buckets so that the all-reduces overlap."""
    wrapped = nn.parallel.DistributedDataParallel(model, **options)
    return Trainer(autocast(torch.compile(wrapped), work), adamw(wrapped))


def compiled_inside_ddp(model: GPT, work: Workload, options: Options) -> Trainer:
    model.compile()
    return ddp(model, work, options)


def sharded(model: GPT, work: Workload, options: Options) -> Trainer:
    """`fully_shard` on each block, then on the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": init_device_mesh(work.device, (dist.get_world_size(),)), **on_mesh(work, options)}
    if work.dtype == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks_of(model):
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    return Trainer(model, adamw(model))


def compiled_sharded(model: GPT, work: Workload, options: Options) -> Trainer:
    """The usual recipe: each block is compiled, the gathers stay in eager hooks between them."""
    for block in blocks_of(model):
        block.compile()  # a Llama that returns its cache recompiles for eight layers, and then runs uncompiled
    return sharded(model, work, options)


def on_mesh(work: Workload, options: Options) -> Options:
    """`options` with the mesh of two axes that `replicas` asks for."""
    from torch.distributed.device_mesh import init_device_mesh

    replicas, options = options.get("replicas", 1), {k: v for k, v in options.items() if k != "replicas"}
    if replicas == 1:
        return options
    sizes = (replicas, dist.get_world_size() // replicas)
    return {"mesh": init_device_mesh(work.device, sizes, mesh_dim_names=("dp_replicate", "dp_shard")), **options}


def zerograph_stage(stage: int | str) -> Callable[[GPT, Workload, Options], Trainer]:
    def build(model: GPT, work: Workload, options: Options) -> Trainer:
        import zerograph

        precision = {"dtype": torch.bfloat16} if work.dtype == "bf16" else {}
        options = dict(options)
        divide(model, work, options.pop("experts", 1))
        backend = zerograph.backend(stage=stage, **precision, **on_mesh(work, options))
        model.compile(backend=backend)
        return Trainer(model, adamw(model), backend)

    return build


def divide(model: nn.Module, work: Workload, ranks: int) -> None:
    """Divide the experts of `model` over so many ranks next to each other."""
    from torch.distributed.device_mesh import init_device_mesh

    from zerograph.integrations.expert_parallel import divide_experts

    if ranks > 1:
        mesh = init_device_mesh(work.device, (dist.get_world_size() // ranks, ranks), mesh_dim_names=("dp", "ep"))
        divide_experts(model, mesh["ep"])


def zerograph_nvme(stage: int, offload: str) -> Callable[[GPT, Workload, Options], Trainer]:
    """What is offloaded in files of a folder (`path`), and the optimizer that streams states; with `overlap=true` in
    the backward. To compare that with there is `overlap=false`: neither takes the norm of the gradients. With
    `overlap=forward` updates run in the next forward."""

    def build(model: GPT, work: Workload, options: Options) -> Trainer:
        import zerograph

        there = {"path": tempfile.gettempdir(), **options, "offload": offload, "tier": "nvme"}
        overlap = there.pop("overlap", None)
        trainer = zerograph_stage(stage)(model, work, there)
        own = {} if overlap is None else {"overlap": overlap, "skip_nonfinite": overlap == "forward"}
        trainer.optimizer = zerograph.optim.AdamW(model.parameters(), lr=LEARNING_RATE, **own)
        return trainer

    return build


def deepspeed_stage(stage: int, *, nvme: bool = False) -> Callable[[GPT, Workload, Options], Trainer]:
    """Of `nvme` parameters, gradients and states are in files, and the optimizer is DeepSpeed's own."""

    def build(model: GPT, work: Workload, options: Options) -> Trainer:
        import deepspeed

        if nvme:
            there = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 8}
            options = {"offload_optimizer": there, "offload_param": there, **options}
        settings = {
            "train_micro_batch_size_per_gpu": work.batch,
            "zero_optimization": {"stage": stage, **options},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": work.dtype == "bf16"},
            "communication_data_type": "fp32",
        }
        inner = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=LEARNING_RATE) if nvme else adamw(model)
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=inner, config=settings, dist_init_required=False
        )
        for state in inner.state.values():
            state["step"].zero_()  # DeepSpeed makes the state by a dummy step, which would shift Adam's bias correction
        return DeepSpeedTrainer(engine, optimizer, engine=engine)

    return build


VARIANTS: dict[str, Variant] = {
    "eager": Variant("eager", eager, group=False),
    "compile": Variant("torch.compile", compiled, group=False),
    "checkpoint": Variant("eager, checkpointed blocks", checkpointed(eager), group=False),
    "compile-checkpoint": Variant("torch.compile, checkpointed blocks", checkpointed(compiled), group=False),
    "compile-chunker": Variant("torch.compile with auto_chunker", chunking_compiler, group=False),
    "compile-liger": Variant("torch.compile, Liger's loss in torch", chunked, group=False),
    "ddp": Variant("DDP", ddp),
    "ddp-compiled": Variant("compiled DDP", compiled_ddp),
    "ddp-inside": Variant("DDP of a compiled model", compiled_inside_ddp),
    "fsdp": Variant("fully_shard", sharded),
    "fsdp-checkpoint": Variant("fully_shard, checkpointed blocks", checkpointed(sharded)),
    "fsdp-compiled": Variant("fully_shard, compiled blocks", compiled_sharded),
    **{f"zg{n}": Variant(f"zerograph stage {n}", zerograph_stage(n), False, "zerograph") for n in (0, 1, 2, 3, "auto")},
    **{
        f"zg{n}-nvme": Variant(
            f"zerograph stage {n}, states on NVMe", zerograph_nvme(n, "optimizer"), False, "zerograph"
        )
        for n in (1, 2, 3)
    },
    "zg3-infinity": Variant("zerograph, all on NVMe", zerograph_nvme(3, "parameters"), False, "zerograph"),
    **{f"ds{n}": Variant(f"DeepSpeed ZeRO-{n}", deepspeed_stage(n), True, "deepspeed") for n in (1, 2, 3)},
    "ds3-infinity": Variant("DeepSpeed, all on NVMe", deepspeed_stage(3, nvme=True), True, "deepspeed"),
}


def parse(spec: str) -> tuple[Variant, Options]:
    """`zg3:bucket_size=8MiB` -> the variant and {"bucket_size": 8388608}. ValueError for a name that is not known."""
    name, *pairs = spec.split(":")
    if name not in VARIANTS or not all("=" in pair for pair in pairs):
        raise ValueError(f"no variant {spec!r}\n\nhint: NAME[:OPTION=VALUE]..., NAME one of {', '.join(VARIANTS)}")
    return VARIANTS[name], {key: literal(value) for key, value in (pair.split("=", 1) for pair in pairs)}


def literal(text: str) -> Any:
    """An option's value: an integer, a size such as 8MiB, true, false, none, or the text itself."""
    if text[-3:] in UNITS:
        return int(float(text[:-3]) * UNITS[text[-3:]])
    try:
        return int(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def title(spec: str) -> str:
    return ", ".join([parse(spec)[0].title, *spec.split(":")[1:]])


def missing(spec: str) -> str | None:
    """Why this variant cannot run here, or None."""
    module = parse(spec)[0].module
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def part_by_part(forward: Callable[[Tensor, Tensor], Tensor], parts: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`forward` for so many parts of the batch, each but the last with its backward; returns the loss of all, of which
    the backward of the last part is left."""
    if parts == 1:
        return forward

    def call(tokens: Tensor, targets: Tensor) -> Tensor:
        *first, last = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
        total = torch.zeros((), device=tokens.device)
        for part in first:
            loss = forward(*part) / parts
            loss.backward()
            total += loss.detach()
        return forward(*last) / parts + total

    return call


def autocast(model: Callable[..., Any], work: Workload) -> Callable[..., Any]:
    """The model's call under autocast, which is how DDP and a single process compute in bf16."""
    if work.dtype == "fp32":
        return model

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(work.device, torch.bfloat16):
            return model(*args, **kwargs)

    return call


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def group_parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the optimizer holds now: an adopting backend replaces the parameters it was made with."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The 2-norm of the whole gradient. Every rank must call it: the shards' squares are summed over the ranks."""
    shards, replicated = 0.0, 0.0
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        if isinstance(gradient, DTensor) and any(p.is_shard() for p in gradient.placements):
            copies = math.prod(
                n for n, p in zip(gradient.device_mesh.shape, gradient.placements, strict=True) if p.is_replicate()
            )
            shards += float(gradient.to_local().double().square().sum()) / copies
        else:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            replicated += float(local.double().square().sum())
    return (replicated + summed(shards, parameters)) ** 0.5


def summed(value: float, parameters: Iterable[nn.Parameter]) -> float:
    """`value` summed over the ranks, if there are several."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=next(iter(parameters)).device)
    dist.all_reduce(total)
    return float(total)
