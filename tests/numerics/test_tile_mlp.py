"""MLPs in one loop over their hidden dimension: trainings as close as sums allow to those of whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics.compare import full
from numerics.test_tiles import RowsIn, Training
from ranks import run
from torch import Tensor, nn


class Gelu(nn.Module):
    """Two linear layers with biases; ranks and tiles divide the middle unevenly."""

    def __init__(self, hidden: int = 71, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, hidden, bias=bias), nn.Linear(hidden, 24, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGlu(nn.Module):
    """A gated middle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((24, 50), (24, 50), (50, 24)))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Transposed(nn.Module):
    """GPT-2's: weights whose rows are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = RowsIn(24, 29), RowsIn(29, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Infinite(nn.Module):
    """Its middle is infinite where the first layer gives zero, as of rows that pad a shard."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 13), nn.Linear(13, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.rsqrt(self.up(x).square()).tanh())


class Mlps(nn.Module):
    """One of each kind, one of them frozen, one half frozen, one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gelu, self.glu, self.transposed, self.infinite = Gelu(), SwiGlu(), Transposed(), Infinite()
        self.frozen, self.partly, self.twice = Gelu(40, bias=False).requires_grad_(False), Gelu(40), Gelu(30)
        self.partly.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.gelu.up.weight.dtype)
        for mlp in (self.gelu, self.glu, self.transposed, self.infinite, self.frozen, self.partly, self.twice, self.twice):
            x = x + mlp(F.layer_norm(x, (24,)))
        return x


LOOPS = {"gelu", "glu", "transposed", "infinite", "frozen", "partly", "twice"}
WEIGHTS = {"*.weight": 3}


def _train(steps: int, tile: Any, **options: Any) -> Training:
    training = Training(None, Mlps, stage=3, bucket_size=2000, tile=tile, **options)
    training.before = training.evaluated()  # type: ignore[attr-defined]
    training.steps(steps)
    return training


def _loops(training: Training) -> set[str]:
    return {bucket.loop for bucket in training.backend.report().buckets if bucket.loop}


def _as_whole(steps: int, options: dict[str, Any]) -> None:
    tiled, whole = _train(steps, WEIGHTS, **options), _train(steps, "off", **options)
    assert _loops(tiled) == LOOPS and not _loops(whole)
    losses, values, after = tiled.result()
    expected, truth, last = whole.result()
    torch.testing.assert_close(tiled.before, whole.before, rtol=1e-6, atol=1e-6)  # type: ignore[attr-defined]
    assert losses == pytest.approx(expected, rel=1e-6)
    for name, value in truth.items():
        torch.testing.assert_close(values[name], value, rtol=1e-6, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")
    torch.testing.assert_close(after, last, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("world_size", "compute"), [(2, "eager"), (2, "inductor"), (4, "eager")])
def test_loops_train_as_whole_layers(world_size: int, compute: str) -> None:
    run(world_size, _as_whole, 20, {"compute": compute})


def _again() -> None:
    first, second = _train(4, WEIGHTS), _train(4, WEIGHTS)
    (losses, values, after), (others, theirs, last) = first.result(), second.result()
    assert losses == others and torch.equal(after, last)
    assert all(torch.equal(value, theirs[name]) for name, value in values.items())


def test_the_same_tiles_give_the_same_bits() -> None:
    run(2, _again)


def _accumulated(tile: Any) -> list[Tensor]:
    training = Training(None, Mlps, stage=3, bucket_size=2000, tile=tile)
    with training.backend.no_sync():
        training.backward(1)
        training.backward(2)
    training.backward(3)
    found = [full(p.grad) for p in training.model.parameters() if p.grad is not None]
    training.optimizer.zero_grad()
    for rows in (3, 5):  # the second number makes a dynamic graph
        training.backward(rows, rows)
    return found + [full(p.grad) for p in training.model.parameters() if p.grad is not None]


def _accumulate() -> None:
    for found, expected in zip(_accumulated(WEIGHTS), _accumulated("off"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_held_back_and_batches_of_other_sizes() -> None:
    run(2, _accumulate)
