"""The same losses and parameters as PyTorch's own data parallelism, on two ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numerics.compare import Result, check, full_values, mean_over_ranks, mine, seeded
from ranks import run
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zerograph


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int = 65, width: int = 32, layers: int = 2, length: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _train(how: str, compute: str) -> Result:
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = GPT()
    model: nn.Module = module
    if how == "DDP":
        model = DistributedDataParallel(module)
    elif how == "fully_shard":
        for block in module.blocks:
            fully_shard(block)
        fully_shard(module)
    else:
        stage = int(how.split()[-1])
        module.compile(backend=zerograph.backend(stage=stage, compute=compute, bucket_size="64KB"))
    # A large eps: the gradient of an attention's key bias is zero up to rounding, which Adam would blow up.
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, eps=1e-4)
    losses = []
    for step in range(5):
        (ids,) = mine([torch.randint(0, 65, (2 * dist.get_world_size(), 16), generator=seeded(step))])
        loss = F.cross_entropy(model(ids).flatten(0, 1), (ids.flatten() * 7 + 3) % 65)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_over_ranks(loss).item())
    return Result(losses, full_values(module))


def _all(compute: str, stages: tuple[int, ...]) -> dict[str, Result]:
    return {how: _train(how, compute) for how in ("DDP", "fully_shard", *(f"stage {stage}" for stage in stages))}


@pytest.mark.parametrize(("compute", "stages"), [("eager", (0, 3)), ("inductor", (3,))])
def test_trains_like_ddp_and_fully_shard(compute: str, stages: tuple[int, ...]) -> None:
    """Losses within 1e-5 (2e-5 where Inductor fuses) and parameters within as much."""
    results = run(2, _all, compute, stages)[0]
    for theirs in ("DDP", "fully_shard"):
        ours = {stage: results[f"stage {stage}"] for stage in stages}
        check({None: results[theirs], **ours}, rel=2e-5, atol=2e-5)
