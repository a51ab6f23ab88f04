"""Training on a mesh of two axes: two replicas of two shards against plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numerics.compare import (
    Case,
    Result,
    Values,
    assert_same,
    check,
    full,
    full_values,
    mean_over_ranks,
    mine,
    pickled_and_back,
    seeded,
    sgd,
    stages,
)
from numerics.test_caught_errors import TRAP
from numerics.test_caught_errors import Net as TrappedNet
from ranks import run
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.utils import clip_grad_norm_
from toy import VOCABULARY, Toy
from traced import TracedOnce, compile_once

import zerograph
from zerograph.core.errors import RankError

WORLD = 4
TRANSPORTS = ["auto", "group"]


class Net(Toy):
    """Tied and frozen weights, uneven rows, a scalar, a parameter of one row, buffers; some of it runs uncompiled."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1, VOCABULARY), 0.5))
        self.between = nn.Linear(VOCABULARY, VOCABULARY)
        self.broken = False

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.norm(self.embed(tokens) * self.scale + self.shift.to(self.scale.dtype))
        logits = self.head(h + self.down(torch.relu(self.up(h)))) * self.gain
        if self.broken:
            torch._dynamo.graph_break()
            logits = logits + self.uncompiled(logits)
        return logits + torch.tanh(self.between(logits))

    @torch.compiler.disable
    def uncompiled(self, logits: Tensor) -> Tensor:
        """Reads parameters outside of compiled code."""
        return self.between(logits) + self.down.weight.sum() * self.gain


def build(broken: bool = False) -> Net:
    """A model whose values, and buffers, are other ones on each rank: those of rank 0 count."""
    torch.manual_seed(dist.get_rank())
    net = Net().train()
    net.norm.running_mean.normal_()
    net.shift.normal_()
    net.broken = broken
    return net


def tokens(generator: torch.Generator, rows: int) -> tuple[Tensor, ...]:
    return (torch.randint(0, VOCABULARY, (rows,), generator=generator),)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x).float(), x)


def case() -> Case:
    return Case(build(), tokens, loss_of)


@functools.lru_cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))


def _stages(chosen: tuple[int, ...], transport: str, **options: Any) -> dict[int | None, Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        return stages(case, chosen, {"shape": (2, 2), **options})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_stages_train_like_pytorch(transport: str) -> None:
    first, *others = run(WORLD, _stages, (0, 3) if transport == "auto" else (3,), transport)
    check(first, atol=2e-5)
    for other in others:
        for stage in set(first) - {None}:
            assert_same(other[stage].values, first[stage].values)


class Training:
    """Ours, of a model that is traced once in a process unless it is ``broken``; with ``stage`` None plain PyTorch on
    the whole batch."""

    def __init__(
        self,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        stage: int | None = 3,
        broken: bool = False,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self.model, self.backend, self.losses = build(broken), None, list[float]()
        self.compiled: Any = self.model
        if stage is None:
            for value in self.model.state_dict(keep_vars=True).values():
                dist.broadcast(value.data, 0)
            dist.broadcast(self.model.shift, 0)
        else:
            options = {"compute": "eager", "bucket_size": "200B", "mesh": mesh or grid(), **options}
            self.backend = zerograph.backend(stage=stage, **options)
            if broken:
                self.model.compile(backend=self.backend)
            else:
                self.compiled = TracedOnce(self.model, self.backend, tuple(self.backend.config.mesh.shape))
        self.optimizer = optimizer(self.model)

    def backward(self, seed: int, scale: float = 1.0) -> None:
        (whole,) = tokens(seeded(seed), 3 * WORLD)
        loss = loss_of(self.compiled, whole if self.backend is None else mine([whole])[0])
        (loss * scale).backward()
        self.losses.append((loss if self.backend is None else mean_over_ranks(loss)).item())

    def step(self, seed: int, micro: int = 1) -> None:
        for part in range(micro):
            held = self.backend is not None and part < micro - 1
            with self.backend.no_sync() if held else nullcontext():
                self.backward(seed + 100 * part)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def result(self) -> Result:
        return Result(self.losses, full_values(self.model))


def close(ours: Result, truth: Result, tolerance: float = 2e-5) -> None:
    assert ours.losses == pytest.approx(truth.losses, rel=1e-4)
    for name, value in truth.values.items():
        torch.testing.assert_close(
            ours.values[name], value, rtol=1e-4, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    same_everywhere(ours.values)


def same_everywhere(values: Values) -> None:
    """Equal to the bit on all ranks."""
    for name, value in values.items():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value), name


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def native(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return zerograph.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options)


def _accumulates(stage: int, broken: bool) -> None:
    ours, truth = Training(adamw, stage, broken), Training(adamw, None, broken)
    for training in (ours, truth):
        training.step(0)
        training.step(1, micro=2)
        training.step(2)
    close(ours.result(), truth.result())


@pytest.mark.parametrize(("stage", "broken"), [(1, False), (3, True), (2, True)])
def test_micro_batches(stage: int, broken: bool) -> None:
    run(WORLD, _accumulates, stage, broken)


def _clips() -> None:
    """A norm is that of all shards once, and not once for each replica."""
    torch_clips, ours, truth = Training(adamw), Training(adamw), Training(adamw, None)
    inside = Training(native)
    for seed in range(3):
        for training in (truth, torch_clips, ours, inside):
            training.backward(seed)
        found, expected = zerograph.norms(ours.model), zerograph.norms(truth.model)
        assert found.weights == pytest.approx(expected.weights, rel=1e-4)
        assert found.gradients == pytest.approx(expected.gradients, rel=1e-3)
        norms = [full(clip_grad_norm_(each.model.parameters(), 0.1)).item() for each in (truth, torch_clips)]
        norms.append(zerograph.clip_grad_norm_(ours.model.parameters(), 0.1).item())
        for training in (truth, torch_clips, ours, inside):
            training.optimizer.step(**({"clip": 0.1} if training is inside else {}))
            training.optimizer.zero_grad()
        norms.append(float(inside.optimizer.grad_norm))
        assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)
    for training in (torch_clips, ours, inside):
        close(training.result(), truth.result())


def test_norms_and_clipping() -> None:
    run(WORLD, _clips)


def _scales(cls: Any) -> list[float]:
    """Gradients of one rank are infinite: all skip."""
    training = Training(lambda model: cls(model.parameters(), lr=1e-2))
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), []
    for seed in range(5):
        scaler.scale(torch.ones(()))
        training.backward(seed, math.inf if seed == 2 and dist.get_rank() == 3 else scaler.get_scale())
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    same_everywhere(training.result().values)
    return scales


def _scales_both() -> None:
    for cls in (torch.optim.AdamW, zerograph.optim.AdamW):
        assert _scales(cls) == [8.0, 16.0, 8.0, 8.0, 16.0], cls


def test_one_replica_overflows() -> None:
    run(WORLD, _scales_both)


def _offloads(path: str) -> None:
    truth = Training(native, None)
    options = [
        {"optimizer": functools.partial(native, overlap=True, skip_nonfinite=False)},
        {"optimizer": functools.partial(native, overlap="forward")},
        {"offload": "parameters", "path": path, "optimizer": functools.partial(native, overlap="forward")},
        {"activations": "nvme", "offload": "optimizer", "path": path},
    ]
    for seed in range(3):
        truth.step(seed)
    results = []
    for one in options:
        training = Training(**{"optimizer": native, **one})
        for seed in range(3):
            training.step(seed)
        close(training.result(), truth.result())
        results.append(training.result())
    for result in results[1:]:
        assert result.losses == results[0].losses, "to the bit"
        assert_same(result.values, results[0].values)


def test_offload_and_overlap(tmp_path: Path) -> None:
    run(WORLD, _offloads, str(tmp_path))


def _plans() -> None:
    """Searched, in tiles and recomputed: as the truth is, with as many replicas as the mesh has."""
    truth = Training(adamw, None)
    for seed in range(3):
        truth.step(seed)
    options: list[dict[str, Any]] = [
        {"recompute": "full"},
        {"tile": {"up.weight": 2}},
        {"stage": "auto", "memory": "64MiB"},
    ]
    for one in options:
        training = Training(adamw, **one)
        for seed in range(3):
            training.step(seed)
        close(training.result(), truth.result())
        assert training.backend is not None
        plan = training.backend.plan
        assert (plan.world_size, plan.replicas) == (2, 2)
        assert plan.reductions == 2 or "memory" in one, "one goes on to the replicas while the next is under way"


def test_plans_of_a_mesh_with_replicas() -> None:
    run(WORLD, _plans)


def _sixteen_bits() -> dict[int, Result]:
    results, truth = {}, Training(adamw, None)
    for seed in range(3):
        truth.step(seed)
    for stage in (1, 2, 3):
        training = Training(adamw, stage, dtype=torch.bfloat16)
        for seed in range(3):
            training.step(seed)
        results[stage] = training.result()
    same_everywhere(results[3].values)
    assert results[3].losses == pytest.approx(truth.losses, rel=1e-2)
    return results


def test_16_bits() -> None:
    results = run(WORLD, _sixteen_bits)[0]
    for stage in (1, 2):
        assert results[stage].losses == results[3].losses
        assert_same(results[stage].values, results[3].values)


def _saves(path: str) -> tuple[list[float], Values, Values]:
    """Losses and values of what follows, and the values that are saved."""
    training = Training(adamw)
    for seed in range(2):
        training.step(seed)
    states, moments = get_state_dict(training.model, training.optimizer)
    dcp.save({"model": states, "optimizer": moments}, checkpoint_id=path)
    saved = full_values(training.model)
    for seed in range(2, 4):
        training.step(seed)
    return training.losses[2:], full_values(training.model), saved


def _resumes(path: str, shape: tuple[int, ...]) -> tuple[list[float], Values]:
    mesh = init_device_mesh("cpu", shape)
    training = Training(adamw, mesh=mesh)
    zerograph.shard(training.model, training.backend)
    states, moments = get_state_dict(training.model, training.optimizer)
    dcp.load({"model": states, "optimizer": moments}, checkpoint_id=path)
    set_state_dict(training.model, training.optimizer, model_state_dict=states, optim_state_dict=moments)
    for seed in range(2, 4):
        training.step(seed)
    return training.losses, full_values(training.model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_between_meshes(tmp_path: Path) -> None:
    path = str(tmp_path / "dcp")
    losses, values, saved = run(WORLD, _saves, path)[0]
    for shape in ((2, 2), (4, 1), (4,)):
        for ours, theirs in run(WORLD, _resumes, path, shape):
            assert ours == (losses if shape == (2, 2) else pytest.approx(losses, rel=1e-5))
            for name, value in values.items():
                torch.testing.assert_close(theirs[name], value, rtol=1e-5, atol=1e-5)
    alone = Net()
    dcp.load({"model": alone.state_dict()}, checkpoint_id=path)
    assert_same(dict(alone.state_dict()), saved)


def _moves(path: str) -> None:
    """Out of a sharded model and into one: exports, gathered parameters, copies, pickles, and from the meta device."""
    training = Training(adamw)
    training.step(0)
    model, rank = training.model, dist.get_rank()
    zerograph.export(model, path)
    dist.barrier()
    values = full_values(model)
    found = load_file(path)
    for name, value in found.items():
        assert torch.equal(values[name], value), name
    with zerograph.gathered(model):
        assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())
    with zerograph.gathered(model, writeback=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(float(rank + 1))  # rank 0's count
    assert all((full(p) == 1).all() for p in model.parameters())
    model.load_state_dict(found, strict=False)
    assert_same(full_values(model), values)
    copied = copy.deepcopy(model)
    assert_same(full_values(copied), values)
    pickled_and_back(model)
    assert_same(full_values(model), values)
    training.step(1)
    with torch.device("meta"):
        other = Net().train()
    zerograph.shard(other, backend := zerograph.backend(stage=3, compute="eager", mesh=grid()))
    other.compile(backend=backend)
    zerograph.materialize(other, files=path)
    assert all(torch.equal(full(p), values[n]) for n, p in other.named_parameters())


def test_values_go_in_and_out(tmp_path: Path) -> None:
    run(WORLD, _moves, str(tmp_path / "model.safetensors"))


def _fails(transport: str) -> list[str]:
    """A rank of the second replica fails in a forward, in a backward, while gradients are held, and evaluating."""
    rank, texts = dist.get_rank(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        ours, spared = Trapped(), Trapped(once=True)
        for training in (spared, ours):  # to trace the first ends what Dynamo knows of others
            training.step(0)
        for seed, place in enumerate(("forward 1", "backward 1", "forward 0", "backward 2"), start=1):
            TRAP.place, TRAP.error = place if rank == 3 else "", ValueError(f"boom in {place}")
            with pytest.raises(ValueError if rank == 3 else RankError) as caught:
                ours.step(100 + seed, micro=1 + seed % 2)
            texts.append(str(caught.value))
            ours.optimizer.zero_grad()
            for training in (ours, spared):
                training.step(seed)
        assert ours.losses == spared.losses
    assert_same(full_values(ours.net), full_values(spared.net))
    return texts


class Trapped:
    """A model in training that can be made to fail, compiled as any model is or traced ``once`` for all of them."""

    def __init__(self, once: bool = False) -> None:
        torch.manual_seed(0)
        self.net = TrappedNet()
        self.backend = zerograph.backend(stage=3, compute="eager", bucket_size="200B", mesh=grid())
        if once:
            compile_once(self.net, self.backend)
        else:
            self.net.compile(backend=self.backend)
        self.optimizer, self.losses = sgd(self.net), list[float]()

    def step(self, seed: int, micro: int = 1) -> None:
        losses = []
        for part in range(micro):
            with self.backend.no_sync() if part < micro - 1 else nullcontext():
                loss = self.net(mine([torch.randn(8, 8, generator=seeded(seed + 10 * part))])[0])
                loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses += losses


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_ranks_of_all_replicas_fail_and_go_on(transport: str) -> None:
    for rank, texts in enumerate(run(WORLD, _fails, transport)):
        for place, text in zip(("forward 1", "backward 1", "forward 0", "backward 2"), texts, strict=True):
            expected = f"boom in {place}"
            assert text == expected if rank == 3 else f"rank 3 failed: ValueError: {expected}" in text


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor, where: int) -> Tensor:
        return self.last(self.routed(torch.tanh(x), where))

    @torch.compiler.disable
    def routed(self, x: Tensor, where: int) -> Tensor:
        return self.experts[where](x)


def _routes(stage: int, transport: str) -> None:
    """Each rank has an expert of its own; the fifth is nobody's."""
    world, rank = dist.get_world_size(), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", transport)
        torch.manual_seed(0)
        plain, model = Expert(), Expert()
        model.load_state_dict(plain.state_dict())
        model.compile(backend=zerograph.backend(stage=stage, compute="eager", mesh=grid()))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
        for seed in range(3):
            x = torch.randn(world, 6, 8, generator=seeded(seed))
            sum(plain(x[r], (r + seed) % 4).square().mean() / world for r in range(world)).backward()
            model(x[rank], (rank + seed) % 4).square().mean().backward()
            for name, param in plain.named_parameters():
                assert (param.grad is None) == (model.get_parameter(name).grad is None), name
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, value in full_values(plain).items():
            torch.testing.assert_close(full_values(model)[name], value, msg=lambda m, n=name: f"{n}: {m}")
        same_everywhere(full_values(model))


@pytest.mark.parametrize(("stage", "transport"), [(2, "auto"), (1, "group")])
def test_ranks_of_replicas_route_as_they_like(stage: int, transport: str) -> None:
    run(WORLD, _routes, stage, transport)


def _two_meshes() -> None:
    """Models sharded over different meshes of the same ranks, and loaded from files, which bring no backend."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    for shape in ((2, 2), (4,), (4, 1), (2, 2)):
        model = copy.deepcopy(plain)
        backend = zerograph.backend(stage=3, mesh=init_device_mesh("cpu", shape))
        zerograph.shard(model, backend)
        del backend
        assert torch.equal(model(torch.eye(8)), plain(torch.eye(8))), shape
        torch.save(model, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(loaded(torch.eye(8)), plain(torch.eye(8))), shape


def test_models_on_different_meshes_of_the_same_ranks() -> None:
    run(WORLD, _two_meshes)
