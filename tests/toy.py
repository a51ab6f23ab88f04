"""A small awkward model and its training loop, for tests of what happens around training."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerograph

VOCABULARY = 9  # does not divide by 2 or 4, and leaves rank 3 of 4 without rows


class Toy(nn.Module):
    """Tied weights, uneven rows, a scalar, a frozen parameter, buffers of both kinds."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.empty(()))
        self.register_buffer("shift", torch.empty(width), persistent=False)
        self.up.bias.requires_grad_(False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 2.0)
        nn.init.constant_(self.shift, 0.5)

    def train(self, mode: bool = True) -> Toy:
        """Batch statistics stay fixed: they would make the trajectory depend on the world size."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embed(tokens) * self.scale + self.shift)
        return self.head(h + self.down(torch.relu(self.up(h))))


def build(seed: int = 0) -> Toy:
    """A plain model with values, and batch statistics, that depend on ``seed``."""
    torch.manual_seed(seed)
    model = Toy().train()
    model.norm.running_mean.normal_()
    return model


def compiled(model: nn.Module, stage: int = 3, **options: object) -> zerograph.Backend:
    """Compile ``model`` in place, with uncompiled segments; returns its backend."""
    backend = zerograph.backend(stage=stage, compute="eager", **options)
    model.compile(backend=backend)
    return backend


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses over the global batch, which is the same on any number of ranks."""
    losses = []
    world, rank = dist.get_world_size(), dist.get_rank()
    for step in steps:
        tokens = torch.randint(0, VOCABULARY, (8,), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(mine), mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    return losses


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole ``state_dict``, as plain tensors."""
    values = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()}
    return {n: v.detach().clone() for n, v in values.items()}


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names whose values are not bitwise equal; all, when the names differ."""
    if left.keys() != right.keys():
        return sorted(left.keys() ^ right.keys())
    return [name for name in left if not torch.equal(left[name], right[name])]


class PeakMemory:
    """Growth of this process's memory inside the context.

    ``bytes``: of its resident pages, at any time. ``private``: without mapped files, when it was looked at.
    """

    def __enter__(self) -> PeakMemory:
        ctypes.CDLL(None).mallopt(-3, 64 * 1024)  # M_MMAP_THRESHOLD: what is freed goes back, and shows
        Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
        self._before, self._private = self._status("VmRSS"), self._status("RssAnon")
        self.private = 0
        return self

    def look(self) -> None:
        self.private = max(self.private, self._status("RssAnon") - self._private)

    def __exit__(self, *_: object) -> None:
        self.bytes = self._status("VmHWM") - self._before

    @staticmethod
    def _status(field: str) -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) * 1024
