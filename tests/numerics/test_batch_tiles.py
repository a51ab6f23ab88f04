"""Layers that run for a part of the batch at a time compute what they compute in one piece: losses and gradients, at
any world size, wherever shards and activations are."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from numerics.test_tiled_loss import Trained, assert_alike, sgd, trains
from numerics.test_token_tiles import (
    LENGTH,
    WORDS,
    Middle,
    alone,
    assert_same_bits_elsewhere,
    gelu,
    made,
    swiglu,
    twice,
)
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import ConfigError
from zerograph.core.instructions import Accumulate, Compute, Gather, Place, Reduce
from zerograph.core.machine import machine_named
from zerograph.core.step import layer_of
from zerograph.dryrun.forecast import plan_file

BATCH = 6


def made_of(middle: Middle, *given: Any) -> tuple[torch.nn.Module, tuple[Tensor]]:
    return made(middle, *given)[0], (torch.zeros(BATCH, LENGTH, dtype=torch.int64),)


def trained(middle: Middle, *given: Any, run: Any = harness.run, world_size: int = 1, **options: Any) -> list[Trained]:
    """By rank."""
    script = partial(trains, WORDS, (BATCH * world_size, LENGTH), alone)
    return run(world_size, script, made_of, middle, *given, optimizer=sgd, **options)


exact = partial(trained, run=harness.run_here, dtype=torch.float64)


def assert_in_parts(found: Trained, tiles: int) -> None:
    assert found.plan.by_sample and found.plan.token_tiles == tiles
    assert found.plan.token_regions and len(found.plan.token_regions) == len(found.plan.recompute) == 2
    for kind, ends in (("forward", Place), ("backward", Accumulate)):
        done = [i for i in found.program[kind].instructions if isinstance(i, ends)]
        assert len(done) >= 2 * min(tiles, 3) - 2  # six samples make three parts of two, where four were asked for


@pytest.mark.parametrize(
    ("middle", "tiles"), [(gelu, 4), (swiglu, 2), (twice, 4)], ids=lambda one: getattr(one, "__name__", None)
)
def test_every_layer_is_the_same_in_parts(middle: Middle, tiles: int) -> None:
    found = trained(middle, batch_tiles=tiles)
    assert_in_parts(found[0], tiles)
    assert_alike(found, exact(middle))


def test_compiled_beside_a_loss_in_tiles() -> None:
    found = trained(swiglu, run=harness.run_here, batch_tiles=3, loss_tiles=2, compute="inductor")
    assert_in_parts(found[0], 3)
    assert_alike(found, exact(swiglu))
    assert "frame 0: head and loss in 2 tiles of tokens, 2 layers in 3 parts of the batch" in found[0].report


@pytest.mark.parametrize("compute", ["eager", "inductor"])
def test_dropout_draws_the_same_numbers(compute: str) -> None:
    untiled = trained(gelu, False, 0.2, run=harness.run_here, recompute="full", compute=compute)
    found = trained(gelu, False, 0.2, run=harness.run_here, batch_tiles=3, compute=compute)
    assert_in_parts(found[0], 3)
    assert_alike(found, untiled)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wherever_shards_and_activations_are_the_bits_are_the_same(world_size: int, tmp_path: Path) -> None:
    train = partial(trained, gelu, world_size=world_size, batch_tiles=2)
    found = train(stage=3)
    assert_in_parts(found[0], 2)
    assert_alike(found, exact(gelu, world_size=world_size))
    assert_same_bits_elsewhere(found, train, world_size, tmp_path)


def test_each_layer_is_gathered_once_in_each_direction() -> None:
    found = trained(swiglu, world_size=2, batch_tiles=3, bucket_size=1)
    for kind in ("forward", "backward"):
        gathers = [i.bucket for i in found[0].program[kind].instructions if isinstance(i, Gather)]
        layers = {b.index for b in found[0].plan.buckets if b.name.startswith("layers.")}
        assert len(layers) == 2  # one of each, however small buckets are to be
        assert sorted(bucket for bucket in gathers if bucket in layers) == sorted(layers)
    reduced = [i.bucket for i in found[0].program["backward"].instructions if isinstance(i, Reduce)]
    assert len(reduced) == len(set(reduced))


def assert_both_in_parts(found: Trained) -> None:
    for program in found.program.values():
        own = [i for i in program.instructions if isinstance(i, Compute) and layer_of(i.module)]
        assert {layer_of(i.module) for i in own if i.token_tiles > 1} == {"layers.0", "layers.1"}
        # No product or attention is left for the whole batch.
        whole = [i for i in own if i.token_tiles == 1 and program.segments[i.segment].flops]
        assert not whole, whole


@pytest.mark.parametrize(
    ("middle", "recompute"),
    [(gelu, 0.5), (swiglu, "none"), (twice, "none"), (twice, 0.5)],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_layers_that_are_saved_run_in_parts_too(middle: Middle, recompute: str | float) -> None:
    found = trained(middle, batch_tiles=3, recompute=recompute)
    assert len(found[0].plan.recompute) == (1 if recompute == 0.5 else 0)
    assert_both_in_parts(found[0])
    assert_alike(found, exact(middle))


@pytest.mark.parametrize("activations", ["keep", "nvme"])
def test_both_halves_of_a_layer_run_in_parts_where_it_saves(activations: str, tmp_path: Path) -> None:
    """They have a sum of autograd's in common, which is of no layer."""
    there = {"path": str(tmp_path)} if activations == "nvme" else {}
    found = trained(gelu, batch_tiles=3, recompute="none", activations=activations, **there)
    assert_both_in_parts(found[0])
    assert_alike(found, exact(gelu))


def test_a_search_saves_of_layers_in_parts_what_fits() -> None:
    make = partial(made_of, gelu)
    ample, tight = (
        plan_file("m", make, machine_named("cpu"), stage="auto", memory=memory, batch_tiles=2).plan
        for memory in (2**30, 100_000)
    )
    assert len(ample.token_regions) == len(tight.token_regions) == 2
    assert 0 < len(tight.save) < len(ample.save)


def test_saved_layers_in_parts_have_the_same_bits_wherever_shards_and_activations_are(tmp_path: Path) -> None:
    train = partial(trained, gelu, world_size=2, batch_tiles=2, recompute="none")
    assert_same_bits_elsewhere(train(stage=3), train, 2, tmp_path)


def test_a_plan_may_save_some_activations_of_a_layer_in_parts(tmp_path: Path) -> None:
    file = plan_file("m", partial(made_of, gelu), machine_named("cpu"), batch_tiles=2)
    saved = tuple(f"{layer}.{name}" for layer in file.plan.recompute for name in ("up:addmm", "qkv:addmm"))
    (tmp_path / "plan.json").write_text(replace(file, plan=replace(file.plan, save=saved)).to_json())
    found = trained(gelu, plan=str(tmp_path / "plan.json"))
    assert found[0].plan.save == saved
    assert_both_in_parts(found[0])
    assert_alike(found, exact(gelu))


class Mixed(nn.Module):
    """Layers of which the first may look at all samples."""

    def __init__(self, mixes: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Looks(mixes and i == 0) for i in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Looks(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(8, 32), nn.Linear(32, 8), mixes

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.relu(self.up(x)))
        return x + (y - y.cumsum(0) if self.mixes else y)


def compiled(model: nn.Module, **options: Any) -> Any:
    torch._dynamo.reset()
    backend = zerograph.backend(compute="eager", **options)
    model.compile(backend=backend, dynamic=False)
    return backend


def assert_step_of(model: nn.Module, truth: nn.Module, x: Tensor) -> None:
    """Loss and gradients of ``model`` are those of ``truth``."""
    model.zero_grad()
    truth.zero_grad()
    loss, wanted = model(x), truth(x)
    loss.backward()
    wanted.backward()
    assert torch.allclose(loss, wanted, atol=1e-6)
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert (ours.grad - theirs.grad).abs().max() < 1e-6


def test_a_layer_that_looks_at_several_samples_is_whole_and_the_warning_names_the_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(4, 3, 8)
    truth = copy.deepcopy(model)
    backend = compiled(model, batch_tiles=2)
    assert_step_of(model, truth, x)
    assert "leaves 1 of 2 layers whole, layers.0 because aten.cumsum.default is not known" in caplog.text
    assert "treat every sample by itself (" in caplog.text and "test_batch_tiles.py:" in caplog.text
    assert backend.plan.token_regions == ("layers.1.up:addmm",)


@pytest.mark.parametrize(("samples", "why"), [(1, "has a batch of 1"), (0, "has a batch of 0")])
def test_a_batch_that_cannot_be_divided_runs_whole(samples: int, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Mixed(mixes=False)
    compiled(model, batch_tiles=2)
    model(torch.zeros(samples, 3, 8)).backward()
    assert why in caplog.text
    assert model.layers[0].up.weight.grad is not None


def test_evaluation_and_other_batches_between_steps() -> None:
    torch.manual_seed(0)
    model = Mixed(mixes=False)
    truth = copy.deepcopy(model)
    compiled(model, batch_tiles=2)
    for samples in (4, 5, 1, 4):
        x = torch.randn(samples, 3, 8)
        with torch.no_grad():
            assert torch.allclose(model(x), truth(x), atol=1e-6)
        assert_step_of(model, truth, x)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_tiles": 0}, "batch_tiles must be"),
        ({"batch_tiles": True}, "batch_tiles must be"),
        ({"batch_tiles": 2, "token_tiles": 2}, "a layer is divided in one way"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        zerograph.backend(**options)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"batch_tiles": 4}, {"batch_tiles": 4, "recompute": "none"}])
def test_twenty_steps_are_those_of_the_whole_batch(given: dict[str, Any]) -> None:
    """With dropout, and attention that takes query, key and value apart as timm does."""
    torch.manual_seed(0)
    model = Twenty()
    truth = copy.deepcopy(model)
    losses: dict[str, list[float]] = {"parts": [], "whole": []}
    for name, one, options in (("parts", model, given), ("whole", truth, {"recompute": "full"})):
        compiled(one, **options)
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-3)
        torch.manual_seed(1)
        for _ in range(20):
            loss = one(torch.randn(8, 5, 16))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
    for ours, theirs in zip(*losses.values(), strict=True):
        assert abs(ours - theirs) <= 1e-6 * abs(theirs)


class Twenty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attends() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - 1).square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.drop = nn.Linear(16, 64), nn.Linear(64, 16), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        samples, tokens, width = x.shape
        heads = self.qkv(self.norm(x)).reshape(samples, tokens, 3, 4, 4).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        weights = (query @ key.transpose(-2, -1) / 2).softmax(-1)
        x = x + self.drop(self.out((weights @ value).transpose(1, 2).reshape(samples, tokens, width)))
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Drops(nn.Module):
    """A path that is dropped for some samples, as timm and torchvision write it, and channels that are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        path = x.new_empty((len(x), 1, 1)).bernoulli_(0.7).div_(0.7)
        return x + path * F.dropout1d(self.down(torch.relu(self.up(x))), 0.3)


@pytest.mark.parametrize("compute", ["eager", pytest.param("inductor", marks=pytest.mark.costly)])
def test_paths_are_dropped_for_the_same_samples(compute: str) -> None:
    losses = []
    for options in ({"batch_tiles": 2}, {"recompute": "full"}):
        torch.manual_seed(0)
        model = Mixed(mixes=False)
        model.layers = nn.ModuleList(Drops() for _ in range(2))
        torch._dynamo.reset()
        backend = zerograph.backend(compute=compute, **options)
        model.compile(backend=backend, dynamic=False)
        x = torch.randn(4, 3, 8)
        torch.manual_seed(1)
        loss = model(x)
        loss.backward()
        losses.append([loss, *(p.grad for p in model.parameters())])
        assert backend.plan.token_tiles == options.get("batch_tiles", 1)
    for ours, theirs in zip(*losses, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_plan_file_meets_other_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Mixed(mixes=False)
    file = plan_file("m", lambda: (Mixed(mixes=False), (torch.zeros(8, 3, 8),)), machine_named("cpu"), batch_tiles=4)
    (tmp_path / "plan.json").write_text(file.to_json())
    truth = copy.deepcopy(model)
    torch._dynamo.reset()
    model.compile(backend=zerograph.backend(compute="eager", plan=str(tmp_path / "plan.json")), dynamic=False)
    for samples in (8, 5, 1):
        x = torch.randn(samples, 3, 8)
        assert_step_of(model, truth, x)
    assert caplog.text.count("has a batch of 1") == 1


def test_a_length_that_varies_leaves_layers_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Mixed(mixes=False)
    truth = copy.deepcopy(model)
    torch._dynamo.reset()
    model.compile(backend=zerograph.backend(compute="eager", batch_tiles=2))
    for length in (3, 5, 7):
        x = torch.randn(4, length, 8)
        assert_step_of(model, truth, x)
    assert "leaves 2 of 2 layers whole" in caplog.text and "dynamic=False" in caplog.text


class Twice(nn.Module):
    """A stream that one layer works on twice, between other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Looks(False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 1, 0):
            x = self.layers[i](x)
        return x.square().mean()


def test_a_layer_that_is_called_twice_is_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Twice(), torch.randn(4, 3, 8)
    truth = copy.deepcopy(model)
    backend = compiled(model, batch_tiles=2)
    assert_step_of(model, truth, x)
    assert "layers.0 because aten.addmm.default is of a layer that runs more than once" in caplog.text
    assert backend.plan.token_regions == ("layers.1.up:addmm",)


class Masked(nn.Module):
    """Attention with one mask for all samples, whose sides are as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 32), nn.Linear(32, 8)
        self.register_buffer("mask", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)
        return x + self.down(torch.relu(self.up(x)))


def test_a_mask_as_large_as_the_batch_is_for_all_samples() -> None:
    torch.manual_seed(0)
    model, x = Mixed(mixes=False), torch.randn(4, 4, 8)
    model.layers = nn.ModuleList(Masked() for _ in range(2))
    truth = copy.deepcopy(model)
    backend = compiled(model, batch_tiles=2)
    assert_step_of(model, truth, x)
    assert backend.plan.token_tiles == 2


def test_who_trains_no_more_than_a_last_product_hears_that_its_backward_is_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model, x = Mixed(mixes=False), torch.randn(4, 3, 8)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0.down" in name or "layers.1" in name)
    truth = copy.deepcopy(model)
    compiled(model, batch_tiles=2, recompute="none")
    loss, wanted = model(x), truth(x)
    loss.backward()
    wanted.backward()
    for ours, theirs in zip(model.parameters(), truth.parameters(), strict=True):
        assert ours.grad is theirs.grad is None or (ours.grad - theirs.grad).abs().max() < 1e-6
    assert "the backward of layers.0.up:addmm runs whole: no product makes a gradient of it" in caplog.text
    assert "layers.1" not in caplog.text
