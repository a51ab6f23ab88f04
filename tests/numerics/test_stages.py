"""Losses and parameters at every stage: against plain PyTorch in one process, DDP and ``fully_shard``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from harness import Rank
from numerics.compare import ALL, Result, Values, check, full_values, mean_over_ranks, mine, seeded
from ranks import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from toy import adamw, build, compiled, train

import zerograph
from zerograph.runtime.torch_private import local_tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class TiedModel(nn.Module):
    """Embedding tied to the head, rows that do not divide, a parameter of one row."""

    def __init__(self, layers: int = 1, width: int = 16, vocab: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def adam(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step: int, world: int, length: int = 8) -> Tensor:
    """Of all ranks."""
    return torch.randint(0, 33, (4 * world, length), generator=seeded(step))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


How = int | str
"""A stage, or what to compare with: ``plain`` (the whole batch on each rank), ``DDP``, ``fully_shard``."""


def _train(how: How, longer: bool) -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = TiedModel()
    model: nn.Module = module
    if how == "DDP":
        model = DistributedDataParallel(module)
    elif how == "fully_shard":
        for part in (*module.blocks, module):
            fully_shard(part)
    elif how != "plain":
        module.compile(backend=zerograph.backend(stage=how, compute="eager", bucket_size="16KB"))
    optimizer, losses = adam(module), []
    for step in range(3):
        tokens = batch(step, dist.get_world_size(), 8 + longer * step)
        tokens = tokens if how == "plain" else mine([tokens])[0]
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss).item())
    return Result(losses, full_values(module))


def _all(hows: tuple[How, ...], longer: bool) -> dict[How, Result]:
    return {how: _train(how, longer) for how in hows}


def _group_of_one() -> dict[How, Result]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROGRAPH_TRANSPORT", "group")
        model = build()
        backend = compiled(model)
        train(model, adamw(model), range(2))
        reported = backend.report()
        assert (reported.transport, reported.world_size) == ("torch.distributed (gloo)", 1)
        assert reported.peak_whole_buckets and all(isinstance(p, DTensor) for p in model.parameters())
        with backend.record() as recording:
            train(model, adamw(model), range(1))
        assert "reduce" in {span.stream for span in recording.forecast.spans}
        return _all(("plain", *ALL), False)


def test_a_group_of_one_runs_its_collectives() -> None:
    """So that one device shows what stages do."""
    (results,) = run(1, _group_of_one)
    check({None if how == "plain" else how: result for how, result in results.items()}, rel=1e-5, atol=2e-5)


def test_one_process_trains_like_pytorch() -> None:
    """There all stages are one. Lengths change, and compile twice."""
    (results,) = run(1, _all, ("plain", 3), True)
    check({None: results["plain"], 3: results[3]}, rel=1e-5, atol=2e-5)


def made() -> tuple[nn.Module, tuple[Tensor]]:
    return TiedModel(), (torch.zeros(4, 8, dtype=torch.int64),)


def _trains(rank: Rank) -> tuple[list[float], Values]:
    losses = []
    for step in range(3):
        tokens = batch(step, rank.world_size).chunk(rank.world_size)[rank.rank]
        loss = loss_of(rank(tokens), tokens)
        loss.backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: local_tensor(param).detach().clone() for name, param in rank.params.items()}


def _stage(stage: int, world: int) -> Result:
    """What all ranks have together."""
    found = harness.run(world, _trains, made, optimizer=adam, stage=stage, bucket_size="16KB")
    values = {}
    for name, like in TiedModel().named_parameters():
        first, *others = parts = [rows[name] for _, rows in found]
        whole = first.shape == like.shape
        assert not whole or all(torch.equal(first, other) for other in others)
        values[name] = first if whole else torch.cat(parts)
    return Result(torch.tensor([losses for losses, _ in found]).mean(0).tolist(), values)


@pytest.mark.parametrize(("world", "stages"), [(2, ALL), (4, (1, 3))])
def test_every_stage_trains_like_pytorch(world: int, stages: tuple[int, ...]) -> None:
    """Stages 1 to 3 agree to the bit."""
    ours = {stage: _stage(stage, world) for stage in stages}
    for theirs in run(world, _all, ("plain", "DDP", "fully_shard"), False)[-1].values():
        tied = {name: theirs.values[name] for name in ours[stages[0]].values}
        check({None: replace(theirs, values=tied), **ours}, rel=1e-5, atol=2e-5)
