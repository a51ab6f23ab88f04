"""Forwards that compute with ``self.parameters()`` compute with whole ones, on all ranks and from any tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from numerics.compare import Case, check, full, normal, stages
from ranks import run
from torch import Tensor, nn

import zerograph
from zerograph.core.errors import UnsupportedError


class Penalized(nn.Module):
    """A tied, a frozen and a 0-d parameter, and a term over all of them."""

    def __init__(self, penalty: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6, bias=False)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.tied = nn.Linear(6, 9, bias=False)
        self.tied.weight = self.up.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.penalty = penalty

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        x = self.frozen(self.down(self.up(x).relu() + self.tied(x)) * self.scale)
        return x.square().mean() + 0.1 * self.penalty(list(self.parameters()))


def squares(params: list[Tensor]) -> Tensor:
    return sum(p.pow(2).sum() for p in params)  # type: ignore[return-value]


def norm_of_norms(params: list[Tensor]) -> Tensor:
    return torch.stack([p.norm() for p in params]).norm()


def largest_of_means(params: list[Tensor]) -> Tensor:
    with torch.no_grad():
        largest = torch.stack([p.abs().max() for p in params]).max()
    return torch.stack([p.abs().mean() for p in params]).sum() * largest


def all_of_them(params: list[Tensor]) -> Tensor:
    return squares(params) + norm_of_norms(params) + largest_of_means(params)


def _compared() -> None:
    def make() -> Case:
        return Case(Penalized(all_of_them), normal(6), loss=lambda model, x: model(x))

    check(stages(make, (0, 3), {}))


def test_a_term_over_all_parameters_is_that_of_plain_training() -> None:
    run(2, _compared)


def _trained(**options: object) -> tuple[list[float], list[Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Penalized(squares)
    compiled = torch.compile(model, backend=zerograph.backend(stage=3, compute="eager", **options))
    optimizer, losses = zerograph.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        for micro in range(2):
            loss = compiled(torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + micro)))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [full(p) for p in model.parameters()]


def _from_any_tier(folder: str) -> None:
    for dtype in (None, torch.bfloat16):
        expected, offloaded = _trained(dtype=dtype), {"dtype": dtype, "tier": "nvme", "path": folder}
        found = [_trained(offload=offload, **offloaded) for offload in ("gradients", "parameters")]
        _same_bits(*found)
        if dist.get_world_size() > 1:
            _same_bits(expected, found[0])
        for mine, whole in zip(found[0][1], expected[1], strict=True):  # alone three gradients add up in another order
            torch.testing.assert_close(mine, whole)


def _same_bits(a: tuple[list[float], list[Tensor]], b: tuple[list[float], list[Tensor]]) -> None:
    assert a[0] == b[0] and all(map(torch.equal, a[1], b[1]))


@pytest.mark.parametrize("world_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_where_parameters_live_changes_nothing(world_size: int, tmp_path: Path) -> None:
    run(world_size, _from_any_tier, str(tmp_path))


class Unused(Penalized):
    """Of one parameter the forward reads nothing but the shard."""

    def __init__(self) -> None:
        super().__init__(squares)
        self.unused = nn.Parameter(torch.ones(8, 2))


def _refused() -> None:
    compiled = torch.compile(Unused(), backend=zerograph.backend(stage=3, compute="eager"))
    with pytest.raises(UnsupportedError, match=r"(?s)parameters that are split.*in squares.*hint: .*module\.weight"):
        compiled(torch.ones(2, 6))


def test_what_torch_cannot_mix_is_refused_with_the_place_and_what_to_do() -> None:
    run(2, _refused)
