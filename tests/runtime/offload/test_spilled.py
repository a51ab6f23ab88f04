"""Gradients on NVMe: written, added to, and never written over while somebody keeps them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zerograph._core as _core
from zerograph.core.errors import StorageError
from zerograph.core.layout import Layout
from zerograph.core.plan import tile_params
from zerograph.core.step import Param
from zerograph.runtime.offload.blocks import Block
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.locations import Locations
from zerograph.runtime.offload.nvme import Arena, huge_tensor
from zerograph.runtime.offload.room import ArenaRoom
from zerograph.runtime.offload.spilled import PIECE, SpilledGradients

SIZES = {"a": (70, 3), "empty": (0, 3), "b": (PIECE + 900,)}


class Spilling(torch.autograd.Function):
    """Gives its parameters the gradients that it is told, by way of NVMe."""

    @staticmethod
    def forward(ctx, spilled, block, in_tiles, grads, *params):  # type: ignore[no-untyped-def]
        ctx.spilled, ctx.block, ctx.in_tiles, ctx.grads = spilled, block, in_tiles, grads
        return torch.zeros(())

    @staticmethod
    def backward(ctx, _):  # type: ignore[no-untyped-def]
        if ctx.in_tiles:
            given = {name: spilled_in_tiles(ctx.spilled, ctx.block, name, grad) for name, grad in ctx.grads.items()}
        else:
            given = ctx.spilled.spill(ctx.block, ctx.grads)
        ctx.spilled.wait()
        return None, None, None, None, *(given.get(name) for name in SIZES)


def spilled_in_tiles(spilled: SpilledGradients, block: Block, name: str, grad: Tensor) -> Tensor | None:
    """What autograd gets of a gradient that leaves in tiles."""
    param = Param(name, tuple(grad.shape), "float32", "float32", "float32", True, Layout("rows", 1))
    (whole,), rows = tile_params(param, 1), PIECE if grad.dim() == 1 else 24
    begins = range(0, max(1, len(grad)), rows)
    tiles = [replace(whole, begin=begin, end=min(begin + rows, len(grad))) for begin in begins]
    given = [spilled.spill_tile(block, tile, grad[tile.begin : tile.end]) for tile in tiles]
    assert given[1:] == [None] * len(given[1:])
    return given[0]


@pytest.fixture(params=[False, True], ids=["whole", "tiles"])
def in_tiles(request: pytest.FixtureRequest) -> bool:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[8, 2048], ids=["small slots", "large slots"])
def setting(request: pytest.FixtureRequest, in_tiles: bool, tmp_path: Path) -> tuple[dict[str, nn.Parameter], Callable]:  # type: ignore[type-arg]
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(size)) for name, size in SIZES.items()}
    room = ArenaRoom(lambda size: Arena([tmp_path], size), lambda: None)
    arena = room.reserve(4 * 2**20)
    ring = [huge_tensor(request.param * 2**10) for _ in range(3)]
    spilled = SpilledGradients(room, Locations(params), lambda: ring)
    block = Block.of("b", torch.float32, {name: p.numel() for name, p in params.items()})

    def backward(seed: int, *names: str) -> Tensor:
        grads = {n: torch.randn(SIZES[n], generator=torch.Generator().manual_seed(seed)) for n in names or SIZES}
        return Spilling.apply(spilled, block, in_tiles, grads, *params.values())  # type: ignore[no-any-return]

    backward.spilled, backward.arena = spilled, arena  # type: ignore[attr-defined]
    return params, backward


def expected(*seeds: int, name: str = "b") -> Tensor:
    total = torch.zeros(SIZES[name])
    for seed in seeds:
        total += torch.randn(SIZES[name], generator=torch.Generator().manual_seed(seed))
    return total


def test_a_gradient_is_a_mapping_that_the_next_backward_adds_to(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    for seed in (1, 2, 3):
        backward(seed).backward()
        assert all(backward.arena.maps(params[name].grad) for name in ("a", "b"))
    assert torch.equal(params["b"].grad, expected(1, 2, 3))
    assert torch.equal(params["a"].grad, expected(1, 2, 3, name="a"))
    assert params["empty"].grad.shape == (0, 3)


def test_a_gradient_that_is_kept_stays_as_it_is(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    backward(1).backward()
    kept = params["b"].grad[10:]
    for p in params.values():
        p.grad = None
    backward(2).backward()
    assert torch.equal(kept, expected(1)[10:]) and torch.equal(params["b"].grad, expected(2))
    before = backward.spilled.bytes
    del kept
    for p in params.values():
        p.grad = None
    for seed in range(3, 9):
        backward(seed).backward()
        for p in params.values():
            p.grad = None
    backward.spilled.reclaim()
    assert backward.spilled.bytes < before


def test_a_gradient_for_which_there_was_no_room_costs_nothing_later(setting, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting

    def full(*_: object) -> None:
        raise StorageError("no room")

    backward(1).backward()
    kept, params["b"].grad = params["b"].grad, None
    with monkeypatch.context() as patch:
        patch.setattr(backward.spilled._room, "extent", full)
        with pytest.raises(StorageError):
            backward(2).backward()
    del kept
    for seed in (3, 4):
        for p in params.values():
            p.grad = None
        backward.spilled.reclaim()
        backward(seed).backward()
        assert torch.equal(params["b"].grad, expected(seed))


def test_autograd_grad_leaves_grad_alone(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    backward(1).backward()
    (found,) = torch.autograd.grad(backward(2), [params["b"]])
    assert torch.equal(found, expected(2)) and torch.equal(params["b"].grad, expected(1))


def test_parts_of_a_bucket_come_one_after_another(setting) -> None:  # type: ignore[no-untyped-def]
    """As behind a graph break, where two programs have gradients of one bucket."""
    params, backward = setting
    for seed in (1, 2):
        backward(seed, "b").backward()
        backward(seed, "a").backward()
    assert torch.equal(params["a"].grad, expected(1, 2, name="a")) and torch.equal(params["b"].grad, expected(1, 2))


def test_a_gradient_of_the_user_is_added_to_in_memory(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    params["b"].grad = torch.ones(SIZES["b"])
    backward(1).backward()
    assert torch.equal(params["b"].grad, expected(1) + 1) and not backward.arena.maps(params["b"].grad)


def test_hooks_see_each_gradient(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    seen: list[Tensor] = []
    params["b"].register_hook(lambda grad: grad * 2)
    params["a"].register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for seed in (1, 2):
        backward(seed).backward()
    assert torch.equal(params["b"].grad, 2 * expected(1) + 2 * expected(2))
    assert len(seen) == 2 and torch.equal(seen[1], expected(1, 2, name="a"))


def test_squares_are_those_of_what_is_there(setting) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting

    def squares(name: str) -> list[float]:
        grad = params[name].grad.clone()
        return _core.squares([(grad.data_ptr(), _core.DType.float32, grad.numel())])

    backward(1).backward()
    assert backward.spilled.squares(params["b"].grad.data_ptr()) == squares("b")
    backward(2).backward()
    assert backward.spilled.squares(params["b"].grad.data_ptr()) == squares("b")
    torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
    for name in ("a", "b"):
        assert backward.spilled.squares(params[name].grad.data_ptr()) == squares(name)
    assert backward.spilled.squares(params["a"].data_ptr()) is None


def test_squares_are_read_again_of_what_was_touched_only(setting, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    params, backward = setting
    spilled, arena, grad = backward.spilled, backward.arena, lambda: params["b"].grad
    read: list[str] = []
    summed = spilled._summed

    def read_again(block: Block, name: str, extent: Extent) -> list[float]:
        read.append(name)
        return summed(block, name, extent)  # type: ignore[no-any-return]

    monkeypatch.setattr(spilled, "_summed", read_again)

    def reads() -> bool:
        found, there = spilled.squares(grad().data_ptr()), grad().clone()
        assert found == _core.squares([(there.data_ptr(), _core.DType.float32, there.numel())])
        again = bool(read)
        read.clear()
        return again

    backward(1).backward()
    assert reads()  # until somebody asks nothing is summed
    params["b"].grad = None
    backward(2).backward()
    if all(slab.direct for slab in arena._slabs):
        found = spilled.squares(grad().data_ptr())
        assert found and not read
    grad().data.mul_(2)
    assert reads()
    # The system takes what was touched from its cache, as it may at any time.
    params["b"].grad = None
    backward(3).backward()
    time.sleep(0.02)  # a tick of the files' clock, and less than the system takes to do that
    torch._foreach_mul_([grad()], 3)
    extent = spilled._given["b"].extent
    for slab in arena._slabs:
        slab.flush(0, slab.bytes)
    arena.map(extent).drop(0, extent.bytes)
    for slab in arena._slabs:
        slab.drop(0, slab.bytes)
    assert reads()
    backward(4).backward()  # added to what is there
    assert reads()


def test_a_failed_transfer_is_an_error_and_leaves_nothing_under_way(setting) -> None:  # type: ignore[no-untyped-def]
    _, backward = setting
    backward.arena._engine.inject([(_core.FaultPoint.write, 1, 1, _core.FaultEffect.error, errno.EIO)])
    with pytest.raises(StorageError):
        backward(1).backward()
    backward.spilled.abandon()
    assert backward.spilled._under_way == [None] * 3
