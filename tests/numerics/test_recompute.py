"""Recomputing changes what is saved between forward and backward, and nothing that is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Values, assert_same, full, mean_over_ranks, mine, seeded
from ranks import run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerograph
from zerograph.core.config import Recompute
from zerograph.core.machine import machine_named
from zerograph.core.planfile import PlanFile
from zerograph.dryrun.forecast import plan_file

SETTINGS: tuple[Recompute, ...] = ("auto", "none", 0.5, "full")
LAYERS, WIDTH, ROWS, LENGTH = 2, 16, 2, 8
STREAM = ROWS * LENGTH * WIDTH * 4
"""Bytes of the residual stream on one rank: the input of a layer."""


class Block(nn.Module):
    def __init__(self, dropout: float, region: bool, attends: bool) -> None:
        super().__init__()
        self.dropout, self.region, self.attends = dropout, region, attends
        self.norm2 = nn.LayerNorm(WIDTH)
        if attends:
            self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm(x)) if self.attends else x
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.region else self.mlp(x))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout)

    def mlp(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, region: bool = False, layers: int = LAYERS, attends: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block(dropout, region, attends) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Result:
    """Of every step the loss, of the last one gradients and bytes that the forward saved for the backward."""

    losses: list[float]
    grads: Values
    saved: int
    layers: tuple[str, ...] = ()


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the activations that autograd holds; tensors that share memory count once, parameters not at all."""

    def __init__(self, model: nn.Module) -> None:
        self.sizes: dict[int, int] = {}
        parameters = {_memory(p.to_local() if hasattr(p, "to_local") else p) for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            if _memory(tensor) not in parameters:
                self.sizes[_memory(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def _memory(tensor: Tensor) -> int:
    return tensor.detach().untyped_storage().data_ptr()


def train(recompute: Recompute | Path | None, stage: int, compute: str, options: dict[str, Any]) -> Result:
    """Train a fresh model on this rank, maybe by the plan in a file; None is plain PyTorch on the whole batch."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(**options)
    backend = None
    if recompute is not None:
        given = isinstance(recompute, Path)
        ruled = {"stage": stage, "bucket_size": "8KB", "recompute": recompute}
        backend = zerograph.backend(compute=compute, **({"plan": recompute} if given else ruled))
        model.compile(backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, grads, saved = [], {}, 0
    for step in range(2):
        torch.manual_seed(step)  # of masks
        x = torch.randn(ROWS * dist.get_world_size(), LENGTH, 5, generator=seeded(step))
        hooks = SavedBytes(model)
        with hooks:
            loss = model(x if backend is None else mine([x])[0]).square().mean()
        saved = hooks.bytes
        loss.backward()
        grads = {name: full(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss if backend is None else mean_over_ranks(loss)).item())
    return Result(losses, grads, saved, backend.plan.recompute if backend is not None else ())


REGION: dict[str, Any] = {"dropout": 0.3, "region": True}
CASES: list[tuple[int, int, dict[str, Any]]] = [(1, 0, {}), (2, 3, REGION)]
"""World size, stage and what the model has."""


@pytest.mark.parametrize(("world", "stage", "options"), CASES)
def test_the_same_kernels_give_the_same_bits_from_less_memory(world: int, stage: int, options: dict[str, Any]) -> None:
    settings = SETTINGS if world == 1 else tuple(s for s in SETTINGS if s != "none")  # the same at any world size
    results = {setting: run(world, train, setting, stage, "eager", options)[0] for setting in settings}
    for setting in settings:
        assert results[setting].losses == results["auto"].losses, setting
        assert_same(results[setting].grads, results["auto"].grads)
    if not options:
        _close(results["auto"], run(world, train, None, stage, "eager", options)[0])

    saved = {setting: result.saved for setting, result in results.items()}
    assert saved.get("none", saved["auto"]) >= saved["auto"] > saved[0.5] > saved["full"], saved
    states = 0 if options else LAYERS * torch.get_rng_state().nbytes  # attention counts as random without dropout too
    assert saved["full"] < (LAYERS + 2) * STREAM + states, saved  # the inputs of layers, head and embedding
    assert results[0.5].layers == ("blocks.1",)
    assert results["full"].layers == ("blocks.0", "blocks.1")


SINGLE = {":scaled_dot_product_attention": 1152, ".up:addmm": 4096, ".qkv:addmm": 3072}
"""Activations inside of a layer, with their bytes at a batch of :data:`ROWS`."""


def recomputing(world: int, stage: int, layers: int) -> PlanFile:
    """A plan that recomputes all layers."""

    def make() -> tuple[nn.Module, tuple[Tensor]]:
        return Model(layers=layers), (torch.empty(ROWS, LENGTH, 5),)

    return plan_file("tests", make, machine_named("cpu"), world=world, stage=stage, bucket_size="8KB", recompute="full")


def written(path: Path, file: PlanFile, names: Sequence[str]) -> Path:
    """The same, but for ``names`` of each layer."""
    save = tuple(f"{layer}{name}" for layer in file.plan.recompute for name in names)
    path.write_text(replace(file, plan=replace(file.plan, save=save)).to_json())
    return path


@pytest.mark.parametrize(("world", "stage", "layers"), [(1, 0, LAYERS), (2, 3, LAYERS), (1, 0, 8)])
def test_single_activations_are_saved_and_change_no_bit(tmp_path: Path, world: int, stage: int, layers: int) -> None:
    """Of eight layers four are traced, and the rest is made of these."""
    auto = run(world, train, "auto", stage, "eager", {"layers": layers})[0]
    ways: list[tuple[str, ...]] = [(), tuple(SINGLE)]
    if world == 1 and layers == LAYERS:
        ways.insert(1, (".up:addmm",))
    saved, file = [], recomputing(world, stage, layers)
    for names in ways:
        path = written(tmp_path / f"{len(names)}.json", file, names)
        found = run(world, train, path, stage, "eager", {"layers": layers})[0]
        assert found.losses == auto.losses
        assert_same(found.grads, auto.grads)
        saved.append(found.saved)
    # Of attention that is computed again, which counts as random before torch 2.14.
    state = torch.get_rng_state().nbytes if torch.__version__ < (2, 14) else 0
    more = [sum(SINGLE[name] for name in names) - (state if len(names) == len(SINGLE) else 0) for names in ways]
    assert [size - saved[0] for size in saved] == [layers * size for size in more]
    assert saved[-1] < auto.saved


def test_compiled_kernels_agree_and_draw_the_same_masks() -> None:
    """One layer with few kernels, as compiling them takes most of the time."""
    options = {**REGION, "layers": 1, "attends": False}
    auto, whole = (run(1, train, setting, 0, "inductor", options)[0] for setting in ("auto", "full"))
    assert whole.layers == ("blocks.0",)
    _close(whole, auto)


def _close(ours: Result, theirs: Result) -> None:
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for name, grad in theirs.grads.items():
        torch.testing.assert_close(ours.grads[name], grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


class Counting(nn.Module):
    """Each block scales by how often it ran, and overwrites that count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("runs", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.runs.add_(1)
        return x + torch.tanh(self.linear(x) * self.runs)


class Counters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _counted(recompute: Recompute | None) -> Values:
    """Gradients of the second step, and the counts."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Counters(), torch.randn(3, 4)
    if recompute is not None:
        model.compile(backend=zerograph.backend(stage=0, compute="eager", recompute=recompute))
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


@pytest.mark.parametrize("recompute", SETTINGS)
def test_a_buffer_that_is_overwritten_is_not_read_again(recompute: Recompute) -> None:
    torch.testing.assert_close(_counted(recompute), _counted(None))
