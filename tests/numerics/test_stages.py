"""Losses and parameters at every stage: against plain PyTorch in one process, DDP and ``fully_shard``."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from numerics.compare import ALL, Result, check, full_values, mean_over_ranks, mine, seeded
from ranks import run
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from toy import adamw, build, compiled, train

import zerograph


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
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

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


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
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 33, (4 * dist.get_world_size(), 8 + longer * step), generator=seeded(step))
        tokens = tokens if how == "plain" else mine([tokens])[0]
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
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
        told = backend.report()
        assert (told.transport, told.world_size) == ("torch.distributed (gloo)", 1)
        assert told.peak_whole_buckets and all(isinstance(p, DTensor) for p in model.parameters())
        with backend.record() as recording:
            train(model, adamw(model), range(1))
        assert "reduce" in {span.stream for span in recording.forecast.spans}
        return _all(("plain", *ALL), False)


def test_a_group_of_one_runs_its_collectives() -> None:
    """So that one device shows what stages do."""
    (results,) = run(1, _group_of_one)
    check({None if how == "plain" else how: result for how, result in results.items()}, rel=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("world", "hows"),
    [(1, ("plain", 3)), (2, ("plain", "DDP", "fully_shard", *ALL)), (4, ("plain", "DDP", "fully_shard", 1, 3))],
)
def test_every_stage_trains_like_pytorch(world: int, hows: tuple[How, ...]) -> None:
    """Stages 1 to 3 agree to the bit. On one process, where all stages are one, lengths change and compile twice."""
    results = run(world, _all, hows, world == 1)[-1]
    ours = {how: result for how, result in results.items() if isinstance(how, int)}
    for theirs in set(results) - set(ours):
        check({None: results[theirs], **ours}, rel=1e-5, atol=2e-5)
