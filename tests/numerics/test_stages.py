"""Losses and parameters at every stage, against plain PyTorch in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn

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
    """Embedding tied to the head, rows that do not divide, a scalar."""

    def __init__(self, layers: int = 2, width: int = 16, vocab: int = 33) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embed(tokens) * self.scale
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def _train(
    stage: int | None, compute: str, longer: int = 1, steps: int = 3
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Mean losses over ranks, and full parameters; ``stage`` None is plain PyTorch on the whole batch."""
    torch.manual_seed(0)
    model = TiedModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    world, rank = dist.get_world_size(), dist.get_rank()
    if stage is not None:
        model.compile(backend=zerograph.backend(stage=stage, compute=compute, bucket_size="16KB"))
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 33, (4 * world, 8 + longer * step), generator=generator)
        mine = tokens if stage is None else tokens[rank * 4 : (rank + 1) * 4]
        loss = nn.functional.cross_entropy(model(mine).flatten(0, 1), mine.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if stage is not None:
            dist.all_reduce(mean)
            mean /= world
        losses.append(mean.item())
    full = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return losses, {n: p.detach().clone() for n, p in full.items()}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_stage_trains_like_plain_pytorch(world: int) -> None:
    longer = 1 if world == 1 else 0  # lengths that change compile twice
    reference, params = run(world, _train, None, "eager", longer)[0]
    chosen = (0, 1, 2, 3) if world == 2 else (0, 3)
    results = {stage: run(world, _train, stage, "eager", longer)[0] for stage in chosen}
    for losses, ours in results.values():
        assert losses == pytest.approx(reference, rel=1e-5)
        assert all(torch.allclose(ours[n], params[n], atol=2e-5) for n in params)
    for stage in (2, 3) if world == 2 else ():
        assert results[stage][0] == results[1][0]
        assert all(torch.equal(results[stage][1][n], results[1][1][n]) for n in params)
