"""Norms for logs: those of the whole parameters and gradients, on every rank, however they are split."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from ranks import run
from torch import nn
from toy import build, compiled

import zerograph
from zerograph.core.errors import ConfigError, ShardingError
from zerograph.optim.norms import Norms


def expected(model: nn.Module, p: float) -> Norms:
    whole = {n: (_full(q.detach()), _full(q.grad)) for n, q in model.named_parameters()}
    weights = {n: float(torch.linalg.vector_norm(w.double(), p)) for n, (w, _) in whole.items()}
    gradients = {n: float(torch.linalg.vector_norm(g.double(), p)) for n, (_, g) in whole.items() if g is not None}
    return Norms(p, weights, gradients)


def _full(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def close(ours: Norms, theirs: Norms) -> None:
    assert ours.weights == pytest.approx(theirs.weights, rel=1e-6)
    assert ours.gradients == pytest.approx(theirs.gradients, rel=1e-6)


def _norms(stage: int) -> Norms:
    """Tied, frozen, uneven and empty shards, a scalar that stays whole, and a gradient that is missing."""
    model = build()
    compiled(model, stage)
    model(torch.arange(4) + dist.get_rank()).square().sum().backward()
    assert not zerograph.norms(model).gradients.keys() & {"up.bias", "head.weight"}
    model.down.get_parameter("bias").grad = None
    for p in (1.0, 2.0, 3.0, math.inf):
        found = zerograph.norms(model, p)
        close(found, expected(model, p))
        assert "down.bias" in found.weights and "down.bias" not in found.gradients
    found = zerograph.norms(model)
    joint = zerograph.clip_grad_norm_(model.parameters(), 1.0).item()
    assert found.gradient == pytest.approx(joint, rel=1e-6)
    assert found.weight == pytest.approx(math.hypot(*found.weights.values()))
    assert zerograph.norms(model, math.inf).weight == max(expected(model, math.inf).weights.values())
    return found


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (2, 2), (2, 3), (4, 3)])
def test_norms_over_ranks(world: int, stage: int) -> None:
    first, *others = run(world, _norms, stage)
    assert all(other == first for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norms_in_one_process(dtype: torch.dtype) -> None:
    model = build().to(dtype)
    model(torch.arange(4)).sum().backward()
    close(zerograph.norms(torch.compile(model)), expected(model, 2.0))


def test_integers_have_norms_too() -> None:
    """Quantized weights that are frozen."""
    model = nn.Linear(2, 2)
    model.codes = nn.Parameter(torch.tensor([3, 4], dtype=torch.uint8), requires_grad=False)
    assert zerograph.norms(model).weights["codes"] == 5


def test_what_is_not_finite_shows() -> None:
    model = nn.Linear(2, 2)
    model.weight.data[0, 0], model.bias.data[0] = math.nan, math.inf
    for p in (2.0, math.inf):
        found = zerograph.norms(model, p)
        assert math.isnan(found.weights["weight"]) and math.isinf(found.weights["bias"]) and math.isnan(found.weight)


def test_refused() -> None:
    with pytest.raises(ConfigError, match="norm_type=0"):
        zerograph.norms(build(), 0)
    with pytest.raises(ShardingError, match="weight is on the meta device"):
        zerograph.norms(nn.Linear(2, 2, device="meta"))
    assert zerograph.norms(nn.ReLU()) == Norms(2.0, {}, {})
