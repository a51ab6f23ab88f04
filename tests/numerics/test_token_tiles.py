"""Layers in tiles of tokens compute what they compute in one piece: losses and gradients, of every kind of MLP, at any
world size, wherever shards and activations are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.nn.functional as F
from numerics.compare import assert_same, full, seeded
from numerics.test_tiled_loss import Trained, assert_alike, assert_close, sgd, trains
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import ConfigError
from zerograph.core.instructions import Accumulate, Gather, Place, Reduce

WIDTH, WORDS, BATCH, LENGTH = 8, 19, 2, 7  # fourteen tokens: five of four tiles are no even part
Middle = Callable[["Block", Tensor], Tensor]


def gelu(block: Block, x: Tensor) -> Tensor:
    return block.down(F.gelu(block.up(x)))


def swiglu(block: Block, x: Tensor) -> Tensor:
    return block.down(F.silu(block.gate(x)) * block.up(x))


def fused(block: Block, x: Tensor) -> Tensor:
    """Gate and value in one weight, as Phi 3 has it."""
    gate, value = block.both(x).chunk(2, dim=-1)
    return block.down(F.silu(gate) * value)


def rows_in(block: Block, x: Tensor) -> Tensor:
    """Weights whose rows are inputs, as GPT-2 has them."""
    return F.gelu(x @ block.up.weight.T, approximate="tanh") @ block.wide


def twice(block: Block, x: Tensor) -> Tensor:
    """One weight in two products of the MLP."""
    return block.down(torch.relu(block.up(x))) + block.down(block.up(x).sigmoid())


def some(block: Block, x: Tensor) -> Tensor:
    """Of all but the first token, behind what treats each alike: a slice that cannot be taken in cuts no tiles."""
    made = gelu(block, x)
    return torch.cat([x[:, :1], made[:, 1:]], dim=1)


def before_attention(block: Block, x: Tensor) -> Tensor:
    """A second MLP behind what mixes tokens: the backward needs the first one's end before its gradients are there."""
    made = gelu(block, x)
    return gelu(block, made + made.cumsum(dim=1))


class Block(nn.Module):
    """Attention and an MLP, each behind a norm, or with the MLP beside attention."""

    def __init__(self, middle: Middle, parallel: bool, dropout: float) -> None:
        super().__init__()
        self.middle, self.parallel, self.dropout = middle, parallel, dropout
        self.before, self.norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.gate = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Linear(WIDTH, 40, bias=False)
        self.both, self.wide = nn.Linear(WIDTH, 80), nn.Parameter(torch.randn(40, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        h = x + F.dropout(self.out(mixed), self.dropout)
        if self.parallel:
            return h + self.middle(self, self.before(x))
        return h + F.dropout(self.middle(self, self.norm(h)), self.dropout)


class GPT(nn.Module):
    def __init__(self, middle: Middle, parallel: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(middle, parallel, dropout) for _ in range(2))
        for name, p in self.named_parameters():
            used = {swiglu: ("up", "down", "gate"), fused: ("both", "down")}
            used |= dict.fromkeys((gelu, some, before_attention), ("up", "down"))
            left_out = {"up", "down", "gate", "both", "wide"} - {*used.get(middle, name.split("."))}
            if middle in used and name.split(".")[2:3] and name.split(".")[2] in left_out:
                p.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def made(middle: Middle, *given: Any) -> tuple[nn.Module, tuple[Tensor]]:
    return GPT(middle, *given), (torch.zeros(BATCH, LENGTH, dtype=torch.int64),)


def alone(ids: Tensor) -> tuple[Tensor]:
    return (ids,)


def trained(middle: Middle, *given: Any, run: Any = harness.run, world_size: int = 1, **options: Any) -> list[Trained]:
    """By rank."""
    script = partial(trains, WORDS, (BATCH * world_size, LENGTH), alone)
    return run(world_size, script, made, middle, *given, optimizer=sgd, **options)


exact = partial(trained, run=harness.run_here, dtype=torch.float64)


def assert_in_tiles(found: Trained, tiles: int) -> None:
    assert found.plan.token_tiles == tiles
    assert found.plan.token_regions and len(found.plan.token_regions) == len(found.plan.recompute) == 2
    for kind, ends in (("forward", Place), ("backward", Accumulate)):
        done = [i for i in found.program[kind].instructions if isinstance(i, ends)]
        assert len(done) >= 2 * tiles - 2  # the last tile of few tokens may be none


@pytest.mark.parametrize(
    ("middle", "parallel"), [(gelu, True), (swiglu, False), (fused, False), (rows_in, False), (twice, False),
     (some, False)],
    ids=lambda one: one.__name__ if callable(one) else "beside" if one else "behind",
)  # fmt: skip
def test_every_mlp_is_the_same_in_tiles(middle: Middle, parallel: bool) -> None:
    """Behind attention, or beside it."""
    found = trained(middle, parallel, token_tiles=4)
    assert_in_tiles(found[0], 4)
    assert_alike(found, exact(middle, parallel))


def test_compiled_beside_a_loss_in_tiles_and_with_one_token_each() -> None:
    truth = exact(swiglu)
    for tiles in (3, 100):
        found = trained(swiglu, run=harness.run_here, token_tiles=tiles, loss_tiles=2, compute="inductor")
        assert_in_tiles(found[0], tiles) if tiles == 3 else None
        assert_alike(found, truth)
    text = f"frame 0: head and loss in 2 tiles of tokens, MLPs of 2 layers in {tiles} tiles of tokens"
    assert text in found[0].report


def test_dropout_draws_the_same_numbers() -> None:
    untiled = trained(gelu, False, 0.2, recompute="full")
    found = trained(gelu, False, 0.2, token_tiles=3)
    assert_in_tiles(found[0], 3)
    assert_alike(found, untiled)


def assert_same_bits_elsewhere(
    found: list[Trained], train: Callable[..., list[Trained]], world: int, path: Path
) -> None:
    """What was ``found`` at stage 3 is what ``train`` finds at other stages and tiers, and on real processes."""
    saved_on_nvme = {"stage": 3, "activations": "nvme", "path": str(path)}
    others: list[dict[str, Any]] = [
        saved_on_nvme,
        {"stage": 3, "offload": "parameters", "path": str(path)},
        *({"stage": stage} for stage in (1, 2) if world > 1),
        *([{"run": harness.run_processes, **saved_on_nvme}] * (world - 1)),
    ]
    for options in others:
        for ours, theirs in zip(train(**options), found, strict=True):
            assert torch.equal(ours.losses, theirs.losses), options
            assert_same(ours.grads, theirs.grads)


@pytest.mark.parametrize("world_size", [1, 2])
def test_wherever_shards_and_activations_are_the_bits_are_the_same(world_size: int, tmp_path: Path) -> None:
    train = partial(trained, gelu, world_size=world_size, token_tiles=4)
    found = train(stage=3)
    assert_in_tiles(found[0], 4)
    assert_alike(found, exact(gelu, world_size=world_size))
    assert_same_bits_elsewhere(found, train, world_size, tmp_path)


ROWS = {"*.up.weight": 3, "*.gate.weight": 2, "*.both.weight": 2, "*.wide": 2, "*.down.weight": 2}


@pytest.mark.parametrize("middle", [swiglu, rows_in, twice], ids=lambda one: one.__name__)
def test_each_tile_of_tokens_reads_and_reduces_tiles_of_weights(middle: Middle) -> None:
    """Also of weights that have fewer rows on the last rank."""
    found = trained(middle, world_size=3, by_rank=True, stage=3, tile=ROWS, token_tiles=4)
    assert_in_tiles(found[0], 4)
    plan, backward = found[0].plan, found[0].program["backward"].instructions
    for kind in (Gather, Reduce):
        done = [i for i in backward if isinstance(i, kind) and plan.buckets[i.bucket].tiles > 1]
        times = Counter((i.bucket, i.tile) for i in done).values()
        assert times and all(count % 4 == 0 for count in times)
    assert_alike(found, exact(middle, world_size=3))


class Wide(nn.Module):
    """Layers whose MLP is all there is, 64 times as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.GELU(), nn.Linear(512, WIDTH, bias=False))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        return x.square().mean()


def test_neither_weights_nor_gradients_nor_hidden_tensors_are_whole() -> None:
    tokens, weight = 256, 4 * 512 * WIDTH
    found = harness.dry_run(2, lambda: (Wide(), (torch.zeros(tokens, WIDTH),)), tile={"*": 4}, token_tiles=8)
    contents = [one for program in found.frame.programs.values() for one in program.contents]
    assert max(one.bytes for one in contents) == 4 * tokens * 512 // 8
    assert {one.bytes for one in contents if one.kind == "gathered"} == {weight // 4}
    assert max(one.bytes for one in contents if one.kind == "gradient") <= weight // 2  # a rank's shard


def test_tiles_of_tokens_and_of_weights_give_the_same_bits_on_processes() -> None:
    train = partial(trained, swiglu, world_size=2, stage=3, tile=ROWS, token_tiles=4)
    for ours, theirs in zip(train(), train(run=harness.run_processes), strict=True):
        assert torch.equal(ours.losses, theirs.losses)
        assert_same(ours.grads, theirs.grads)


def test_half_of_the_layers() -> None:
    found = trained(gelu, token_tiles=4, recompute=0.5)
    plan = found[0].plan
    assert plan.token_regions == (f"{plan.recompute[0]}.up:addmm",)
    assert_alike(found, exact(gelu))


@pytest.mark.slow
def test_evaluation_and_other_lengths_between_steps() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = GPT(gelu)
    truth = GPT(gelu).double()
    truth.load_state_dict(model.state_dict())
    model.compile(backend=zerograph.backend(compute="eager", token_tiles=4), dynamic=False)
    for length in (7, 1, 7, 5):
        ids = torch.randint(WORDS, (BATCH, length), generator=seeded(length))
        with torch.no_grad():
            assert abs(model(ids).item() - truth(ids).item()) < 1e-5
        model.zero_grad()
        truth.zero_grad()
        model(ids).backward()
        truth(ids).backward()
        grads = {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        assert_close(grads, {name: p.grad for name, p in truth.named_parameters() if p.grad is not None})


def test_a_number_of_tokens_that_varies_runs_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    model = GPT(gelu)
    model.compile(backend=zerograph.backend(compute="eager", token_tiles=4), dynamic=True)
    model(torch.randint(WORDS, (BATCH, LENGTH))).backward()
    assert "token_tiles=4: layers run for all tokens at once" in caplog.text


def test_what_is_saved_cannot_be_in_tiles() -> None:
    with pytest.raises(ConfigError, match="MLPs that are saved are whole"):
        zerograph.backend(token_tiles=2, recompute="none")


def test_of_two_mlps_that_one_is_planned_which_the_backward_can_run_by_tile(caplog: pytest.LogCaptureFixture) -> None:
    found = trained(before_attention, token_tiles=4)
    assert_in_tiles(found[0], 4)
    assert "runs whole" not in caplog.text
    assert_alike(found, exact(before_attention))


def test_an_empty_batch_runs_whole() -> None:
    torch._dynamo.reset()
    block = nn.Sequential(Block(gelu, False, 0.0), nn.Linear(WIDTH, 1))
    block.compile(backend=zerograph.backend(compute="eager", token_tiles=4), dynamic=False)
    block(torch.zeros(0, LENGTH, WIDTH)).sum().backward()
    assert not block[0].up.weight.grad.any()
