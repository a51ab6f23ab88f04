"""OneBitAdam on ranks is the paper's algorithm, written plainly in one process over the gradients of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import RankFailure, run, warned
from torch import Tensor, nn
from torch.nn import functional as F

import zerograph
from zerograph.core.errors import ConfigError, UnsupportedError
from zerograph.core.step import WIRE_BLOCK
from zerograph.optim import AdamW, OneBitAdam
from zerograph.runtime.torch_private import local_tensor

WORLD, FREEZE, STEPS = 2, 6, 20
LR, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.99), 1e-8


class Net(nn.Module):
    """Matrices of more than a block, vectors, a scalar, and rows that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 24)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(24, 13, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x * self.scale), tokens.roll(1, 0))


def batch(step: int, rank: int) -> Tensor:
    """Token 12 never comes."""
    return torch.randint(12, (9,), generator=torch.Generator().manual_seed(100 * step + rank))


# The algorithm.


class Plain:
    """Algorithm 1 of the paper for all ranks at once, with Adam's bias corrections and decoupled weight decay."""

    def __init__(self, model: nn.Module, world: int = WORLD) -> None:
        self.params, self.world, self.count = list(model.parameters()), world, 0
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.sent = [[torch.zeros_like(p) for p in self.params] for _ in range(world)]
        self.averaged = [torch.zeros_like(p).view(-1) for p in self.params]

    @torch.no_grad()
    def step(self, grads: list[list[Tensor]]) -> None:
        """``grads`` are those of each rank."""
        self.count += 1
        for i, p in enumerate(self.params):
            own = [each[i] for each in grads]
            if self.count <= FREEZE:
                mean = torch.stack(own).mean(0)
                self.m[i] = self.m[i] + (1 - BETAS[0]) * (mean - self.m[i])
                self.v[i] = BETAS[1] * self.v[i] + (1 - BETAS[1]) * mean**2
            else:
                self.m[i] = self._averaged(i, [BETAS[0] * self.m[i] + (1 - BETAS[0]) * g for g in own])
            v = self.v[i] / (1 - BETAS[1] ** min(self.count, FREEZE))
            update = self.m[i] / (1 - BETAS[0] ** self.count) / (v.sqrt() + EPS)
            p *= 1 - LR * DECAY
            p -= LR * torch.where(v > 0, update, 0.0)

    def _averaged(self, i: int, momenta: list[Tensor]) -> Tensor:
        signs, chunk = [], -(-momenta[0].numel() // self.world)
        for rank, momentum in enumerate(momenta):
            value = momentum + self.sent[rank][i]
            signs.append(as_signs(value.view(-1), chunk))
            self.sent[rank][i] = value - signs[-1].view_as(value)
        value = torch.stack(signs).mean(0) + self.averaged[i]
        found = as_signs(value, chunk)
        self.averaged[i] = value - found
        return found.view_as(momenta[0])


def as_signs(flat: Tensor, chunk: int) -> Tensor:
    """Signs and mean magnitudes of blocks of the part of each rank; zeros pad the last one's."""
    found = []
    for part in flat.split(chunk):
        full = F.pad(part, (0, chunk - len(part)))
        signs = [torch.where(b >= 0, 1.0, -1.0) * b.abs().mean() for b in full.split(WIRE_BLOCK)]
        found.append(torch.cat(signs)[: len(part)])
    return torch.cat(found)


def plainly(steps: int = STEPS, micro: int = 1) -> list[Tensor]:
    model = Net()
    plain = Plain(model)
    for step in range(steps):
        grads = []
        for rank in range(WORLD):
            model.zero_grad()
            for i in range(micro):
                model(batch(micro * step + i, rank)).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        plain.step(grads)
    return [p.detach() for p in model.parameters()]


# Ranks.


def of(model: nn.Module, **options: Any) -> OneBitAdam:
    matrices, others = ([p for p in model.parameters() if (p.ndim > 1) is wanted] for wanted in (True, False))
    given: dict[str, Any] = {"lr": LR, "freeze_step": FREEZE, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return OneBitAdam([{"params": matrices}, {"params": others}], **given | options)


def made(stage: int, **options: Any) -> tuple[nn.Module, zerograph.Backend, OneBitAdam]:
    torch._dynamo.reset()
    model = Net()
    backend = zerograph.backend(stage=stage, compute="eager", **options)
    model.compile(backend=backend)
    return model, backend, of(model)


def trained(model: nn.Module, optimizer: Any, steps: range, rank: int, micro: int = 1) -> None:
    for step in steps:
        for i in range(micro):
            model(batch(micro * step + i, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    with zerograph.gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def _rank() -> int:
    return torch.distributed.get_rank()


def _trained(stage: int, micro: int) -> list[Tensor]:
    model, _, optimizer = made(stage)
    trained(model, optimizer, range(STEPS), _rank(), micro)
    assert optimizer.is_frozen
    return values(model)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_it_is_the_papers_algorithm(stage: int, micro: int) -> None:
    expected = plainly(micro=micro)
    for found in run(WORLD, _trained, stage, micro):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
