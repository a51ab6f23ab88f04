"""Recomputing changes what is saved between forward and backward, and nothing that is computed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import Rank
from numerics.compare import Values, assert_same, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zerograph
from zerograph.core.config import Recompute
from zerograph.core.machine import machine_named
from zerograph.dryrun.forecast import forecast_file

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


def made(
    dropout: float = 0.0, region: bool = False, layers: int = LAYERS, attends: bool = True
) -> tuple[nn.Module, tuple[Tensor]]:
    return Model(dropout, region, layers, attends), (torch.empty(ROWS, LENGTH, 5),)


@dataclass
class Result:
    """Of every step the loss, of the last one gradients and bytes that the forward saved for the backward."""

    losses: list[float]
    grads: Values
    saved: int
    layers: tuple[str, ...]


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes of the activations that autograd holds; tensors that share memory count once, parameters not at all."""

    def __init__(self, rank: Rank) -> None:
        self.sizes: dict[int, int] = {}
        parameters = {_memory(p.to_local() if hasattr(p, "to_local") else p) for p in rank.parameters()}

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


def trains(rank: Rank) -> Result:
    losses, grads, saved = list[float](), Values(), 0
    for step in range(2):
        torch.manual_seed(step)  # of masks
        batch = torch.randn(ROWS * rank.world_size, LENGTH, 5, generator=seeded(step))
        hooks = SavedBytes(rank)
        with hooks:
            loss = rank(batch.chunk(rank.world_size)[rank.rank]).square().mean()
        saved = hooks.bytes
        loss.backward()
        grads = rank.gradients()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        losses.append(loss.item())
    return Result(losses, grads, saved, rank.backend.plan.recompute if rank.backend is not None else ())


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def assert_alike(found: list[Result], wanted: list[Result]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.losses == theirs.losses
        assert_same(ours.grads, theirs.grads)


RULES: dict[str, Any] = {"optimizer": sgd, "bucket_size": "8KB"}
REGION = (0.3, True)


@pytest.mark.parametrize(("world", "stage", "model"), [(1, 0, ()), (2, 3, REGION)])
def test_the_same_kernels_give_the_same_bits_from_less_memory(world: int, stage: int, model: tuple[Any, ...]) -> None:
    def train(run: Any, recompute: Recompute) -> list[Result]:
        return run(world, trains, made, *model, stage=stage, recompute=recompute, **RULES)

    results = {setting: train(harness.run, setting) for setting in SETTINGS}
    for found in results.values():
        assert_alike(found, results["auto"])
    if world == 1:
        _close(results["auto"][0], harness.run_here(1, trains, made, *model, optimizer=sgd)[0])
    else:
        found = train(harness.run_processes, "full")
        assert_alike(found, results["auto"])
        assert [each.saved for each in found] == [each.saved for each in results["full"]]

    saved = {setting: found[0].saved for setting, found in results.items()}
    assert saved["none"] >= saved["auto"] > saved[0.5] > saved["full"], saved
    states = 0 if model else LAYERS * torch.get_rng_state().nbytes  # attention counts as random without dropout too
    assert saved["full"] < (LAYERS + 2) * STREAM + states, saved  # the inputs of layers, head and embedding
    assert results[0.5][0].layers == ("blocks.1",)
    assert results["full"][0].layers == ("blocks.0", "blocks.1")


SINGLE = {":scaled_dot_product_attention": 1152, ".up:addmm": 4096, ".qkv:addmm": 3072}
"""Activations inside of a layer, with their bytes at a batch of :data:`ROWS`."""


@pytest.mark.parametrize(
    ("run", "world", "stage", "layers"),
    [(harness.run, 1, 0, LAYERS), (harness.run, 2, 3, LAYERS), (harness.run_processes, 1, 0, 8)],
)
def test_single_activations_are_saved_and_change_no_bit(
    tmp_path: Path, run: Any, world: int, stage: int, layers: int
) -> None:
    """Of eight layers Dynamo's backend traces four, and the rest is made of these."""
    model, rules = (0.0, False, layers), {"stage": stage, "bucket_size": "8KB"}
    file = forecast_file("tests", harness.dry_run(world, made, *model, recompute="full", **rules), machine_named("cpu"))
    auto = harness.run(world, trains, made, *model, optimizer=sgd, **rules)
    ways, saved = [(), (".up:addmm",), tuple(SINGLE)] if run is harness.run else [(), tuple(SINGLE)], []
    for names in ways:
        save = tuple(f"{layer}{name}" for layer in file.plan.recompute for name in names)
        (path := tmp_path / "plan.json").write_text(replace(file, plan=replace(file.plan, save=save)).to_json())
        assert_alike(found := run(world, trains, made, *model, optimizer=sgd, plan=path), auto)
        saved.append(found[0].saved)
    more = [sum(SINGLE[name] for name in names) for names in ways]
    assert [size - saved[0] for size in saved] == [layers * size for size in more]
    assert saved[-1] < auto[0].saved


def test_compiled_kernels_agree_and_draw_the_same_masks() -> None:
    """One layer with few kernels, as compiling them takes most of the time."""
    model, rules = (*REGION, 1, False), {"compute": "inductor", "stage": 0, **RULES}
    auto, whole = (
        harness.run_processes(1, trains, made, *model, recompute=way, **rules)[0] for way in ("auto", "full")
    )
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
