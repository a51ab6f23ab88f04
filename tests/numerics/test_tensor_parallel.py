"""Tensor parallelism on another axis of the mesh: two by two ranks against plain PyTorch in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.compare import Steps, Values, assert_same, close, full, full_values, load, pickled_and_back, save, seeded
from ranks import run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grad_norm_
from traced import TracedOnce

import zerograph
from zerograph.core.errors import UnsupportedError
from zerograph.integrations.tensor_parallel import tensor_parallel

WORLD, WIDTH, VOCABULARY = 4, 8, 12


class Block(nn.Module):
    """Attention and a layer of two products, each behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heads = [each(h).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.o(mixed)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain_norms(model: Net) -> dict[str, Any]:
    """Norms stay plain, and activations between products are whole on each rank."""
    block: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    block |= {name: RowwiseParallel() for name in ("o", "down")}
    plan = {f"layers.{i}.{name}": style for i in range(len(model.layers)) for name, style in block.items()}
    return plan | {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def sequences(model: Net) -> dict[str, Any]:
    """Between products each rank of the axis has a part of every sequence."""
    plan: dict[str, Any] = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
    for i in range(len(model.layers)):
        at = f"layers.{i}."
        plan |= {at + name: SequenceParallel(use_local_output=True) for name in ("norm", "norm2")}
        plan |= {at + name: ColwiseParallel(input_layouts=Shard(1)) for name in ("q", "k", "v", "up")}
        plan |= {at + name: RowwiseParallel(output_layouts=Shard(1)) for name in ("o", "down")}
    plan |= {"norm": SequenceParallel(use_local_output=True)}
    return plan | {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}


def split_logits(model: Net) -> dict[str, Any]:
    """Each rank of the axis keeps the logits of a part of the vocabulary."""
    return sequences(model) | {"head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}


@functools.cache
def grid(shape: tuple[int, int] = (2, 2), kind: str = "cpu") -> DeviceMesh:
    """The same in all tests of a process: graphs that are traced once name its groups."""
    return init_device_mesh(kind, shape, mesh_dim_names=("dp", "tp"))


Plan = Callable[[Net], dict[str, Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def native(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


class Training(Steps):
    """Ours, or with ``stage`` None plain PyTorch on the whole batch; with ``once``, of a model that is traced once in a
    process, which takes most of a test's time on four ranks.

    Attributes:
        device: where all train, and what the mesh is of.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        stage: int | None = 3,
        plan: Plan | None = plain_norms,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        mesh: DeviceMesh | None = None,
        once: bool = True,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model, self.losses = Net().to(self.device), list[float]()
        self.mesh, self.splits_loss = None, plan is split_logits
        self.compiled: Callable[[Tensor], Tensor] = self.model
        if stage is not None:
            self.mesh = mesh if mesh is not None else grid(kind=self.device.type)
            if plan is not None:
                parallelize_module(self.model, self.mesh["tp"], plan(self.model))
            options = {"compute": "eager", "bucket_size": "1KB", "mesh": self.mesh["dp"], **options}
            self.backend = zerograph.backend(stage=stage, **options)
            if once:
                self.compiled = TracedOnce(self.model, self.backend, (plan, tuple(self.mesh.shape)))
            else:
                self.model.compile(backend=self.backend)
        self.optimizer = optimizer(self.model)

    def backward(self, seed: int) -> None:
        tokens = torch.randint(0, VOCABULARY, (4, 6), generator=seeded(seed)).to(self.device)
        if self.mesh is not None:
            tokens = tokens.chunk(self.mesh["dp"].size())[self.mesh.get_local_rank("dp")]
        logits = self.compiled(tokens)
        if self.splits_loss and self.mesh is not None:
            with loss_parallel():
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                loss.backward()
            loss = loss.full_tensor()
        else:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
        loss = loss.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(loss, group=self.mesh["dp"].get_group())
            loss /= self.mesh["dp"].size()
        self.losses.append(loss.item())


def _stages(plan: Plan, stages: tuple[int, ...]) -> None:
    """Stage 3 from end to end, and the others of a model that is traced once where that gives plain tensors."""
    truth = Training(None).run()
    results = [Training(stage, plan, once=stage != 3 and plan is not split_logits).run() for stage in stages]
    for result in results:
        close(result, truth)
        for value in result[1].values():
            first = value.clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), "the same on all ranks"
    for result in results[2:]:
        assert result[0] == results[0][0], "to the bit"
        assert_same(result[1], results[0][1])


SPLIT = (split_logits, (3, 0))
"""But for its last layer the same as ``sequences``, which is trained at all stages."""


@pytest.mark.parametrize(("plan", "stages"), [(plain_norms, (3, 0, 1, 2)), (sequences, (3, 0, 1, 2)), SPLIT])
def test_stages_train_like_one_process(plan: Plan, stages: tuple[int, ...]) -> None:
    run(WORLD, _stages, plan, stages)


def _placed() -> None:
    """As ``fully_shard`` places parameters, plain ones aside: those are on both axes here."""
    from torch.distributed.fsdp import fully_shard

    training, other, mesh = Training(3), Net(), grid()
    zerograph.shard(training.model, training.backend)
    parallelize_module(other, mesh["tp"], plain_norms(other))
    parallel = {name for name, param in other.named_parameters() if isinstance(param, DTensor)}
    fully_shard(other, mesh=mesh["dp"])
    theirs = dict(other.named_parameters())
    for name, param in training.model.named_parameters():
        assert isinstance(param, DTensor) and param.device_mesh == mesh
        if name in parallel:
            assert param.placements == theirs[name].placements, name
            assert param.to_local().shape == theirs[name].to_local().shape
        else:
            assert param.placements == (Shard(0), Replicate()), name
    assert theirs.keys() == dict(training.model.named_parameters()).keys() and len(parallel) == 10


def test_parameters_are_placed_as_fully_shard_does() -> None:
    run(WORLD, _placed)


def _clips() -> None:
    truth, stock, ours, inside = Training(None), Training(), Training(), Training(optimizer=native)
    for seed in range(3):
        for training in (truth, stock, ours, inside):
            training.backward(seed)
        expected, found = zerograph.norms(truth.model), zerograph.norms(ours.model)
        assert found.weights == pytest.approx(expected.weights, rel=1e-4)
        assert found.gradients == pytest.approx(expected.gradients, rel=1e-3)
        norms = [full(clip_grad_norm_(each.model.parameters(), 0.1)).item() for each in (truth, stock)]
        norms.append(zerograph.clip_grad_norm_(ours.model.parameters(), 0.1).item())
        largest = [zerograph.norms(each.model, float("inf")).weight for each in (truth, ours)]
        assert largest[0] == pytest.approx(largest[1], rel=1e-5)
        for training in (truth, stock, ours, inside):
            training.optimizer.step(**({"clip": 0.1} if training is inside else {}))
            training.optimizer.zero_grad()
        norms.append(float(inside.optimizer.grad_norm))
        assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)
    for training in (stock, ours, inside):
        close((training.losses, full_values(training.model)), (truth.losses, full_values(truth.model)))


def test_norms_and_clipping_over_both_axes() -> None:
    run(WORLD, _clips)


def _optimizers(path: str) -> None:
    truth = Training(None, optimizer=native).run()
    options: list[dict[str, Any]] = [
        {"optimizer": native},
        {"optimizer": functools.partial(native, overlap=True, skip_nonfinite=False)},
        {"optimizer": native, "offload": "parameters", "path": path},
        {"optimizer": native, "plan": sequences, "recompute": "full"},
        {"optimizer": native, "compute": "inductor"},
    ]
    for one in options:
        close(Training(**one).run(), truth)


def test_native_optimizer_offload_and_recomputation(tmp_path: Path) -> None:
    run(WORLD, _optimizers, str(tmp_path))


def _moves(path: str) -> None:
    training = Training()
    training.step(0)
    model, rank = training.model, dist.get_rank()
    zerograph.export(model, path)
    dist.barrier()
    values, found = full_values(model), load_file(path)
    assert_same(values, found)
    with zerograph.gathered(model):
        assert_same({n: p.detach() for n, p in model.named_parameters()}, values)
    with zerograph.gathered(model, writeback=True), torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view_as(param) + i + rank)  # rank 0's count
    for i, param in enumerate(model.parameters()):
        assert torch.equal(full(param).flatten(), torch.arange(param.numel()) + float(i))
    model.load_state_dict(found)
    assert_same(full_values(model), values)
    assert_same(full_values(copy.deepcopy(model)), values)
    pickled_and_back(model)
    assert_same(full_values(model), values)
    training.step(1)
    with torch.device("meta"):
        other = Net()
    mesh = grid()
    parallelize_module(other, mesh["tp"], plain_norms(other))
    zerograph.shard(other, backend := zerograph.backend(stage=3, compute="eager", mesh=mesh["dp"]))
    other.compile(backend=backend)
    zerograph.materialize(other, files=path)
    assert_same(full_values(other), values)


def test_values_go_in_and_out(tmp_path: Path) -> None:
    run(WORLD, _moves, str(tmp_path / "model.safetensors"))


def _saves(path: str) -> tuple[list[float], Values]:
    training = Training()
    training.run(range(2))
    save(training, path)
    return training.run(range(2, 4))


def _resumes(path: str, shape: tuple[int, int]) -> tuple[list[float], Values]:
    training = Training(mesh=grid(shape), plan=plain_norms if shape[1] > 1 else None)
    load(training, path)
    return training.run(range(2, 4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saved_at_two_by_two_and_resumed_without(tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    losses, values = run(WORLD, _saves, path)[0]
    for shape in ((2, 2), (4, 1)):
        ours, theirs = run(WORLD, _resumes, path, shape)[0]
        assert ours == (losses[2:] if shape == (2, 2) else pytest.approx(losses[2:], rel=1e-5))
        for name, value in values.items():
            torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-5)
    alone = Net()
    dcp.load({"model": alone.state_dict()}, checkpoint_id=path)


def _uneven() -> None:
    """A vocabulary that does not divide by all ranks stays whole along our axis, and trains."""
    global VOCABULARY
    before, VOCABULARY = VOCABULARY, 10
    try:
        training = Training(3)
        close(training.run(), Training(None).run())
        assert training.model.embed.weight.placements == (Replicate(), Shard(0))
        assert training.model.layers[0].o.weight.placements == (Shard(0), Shard(1))
    finally:
        VOCABULARY = before


def test_rows_that_do_not_divide() -> None:
    run(WORLD, _uneven)


def _refused() -> None:
    mesh = grid()
    for ours, match in ((None, "DTensor on"), (mesh, "DTensor on"), (mesh["tp"], "DTensor on")):
        model = Net()
        parallelize_module(model, mesh["tp"], plain_norms(model))
        with pytest.raises(UnsupportedError, match=match):
            zerograph.shard(model, zerograph.backend(stage=3, mesh=ours))
        assert all(not isinstance(p, DTensor) or p.device_mesh == mesh["tp"] for p in model.parameters()), "unchanged"


def test_refused() -> None:
    run(WORLD, _refused)


def _qwen() -> Any:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=True))


def _trains(ours: bool, norms: bool = True) -> tuple[list[float], Values]:
    torch._dynamo.reset()
    model, losses, mesh = _qwen(), list[float](), grid()
    if ours:
        if norms:
            tensor_parallel(model, mesh["tp"])
        else:
            split = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
            parallelize_module(model, mesh["tp"], split | {"model.layers.*.self_attn.o_proj": RowwiseParallel()})
        model.compile(backend=zerograph.backend(stage=3, compute="eager", mesh=mesh["dp"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        tokens = torch.randint(0, 64, (4, 12), generator=seeded(seed))
        if ours:
            tokens = tokens.chunk(2)[mesh.get_local_rank("dp")]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach().clone()
        if ours:
            dist.all_reduce(loss, group=mesh["dp"].get_group())
        losses.append(loss.item() / (2 if ours else 1))
    return losses, full_values(model)


def _compares() -> None:
    """By transformers' own plan: embedding and head too, whose weight Qwen 3 shares."""
    close(_trains(True), _trains(False))
    with pytest.raises(UnsupportedError, match="is not split by tensor parallelism"):
        _trains(True, norms=False)


def test_transformers() -> None:
    pytest.importorskip("transformers")
    run(WORLD, _compares)
