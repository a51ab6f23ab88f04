"""The two views of an extent: direct transfers, and a tensor that maps it."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import examples

import zerograph._core as _core
from zerograph.runtime.offload.extents import Extent
from zerograph.runtime.offload.nvme import Arena, huge_tensor
from zerograph.runtime.offload.store import mapped_tensor

KIB = 2**10
ENGINES = ["threads"] + ["uring"] * (_core.has_uring() and _core.probe_uring() == 0)

Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "assign", "look"]),
        st.integers(0, 399_999),
        st.integers(1, 200_000),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("paths", [1, 2])
def test_both_views_agree_whatever_is_done_through_either(tmp_path: Path, engine: str, paths: int) -> None:
    size = 400_000
    with Arena([tmp_path] * paths, 2**20, stripe=64 * KIB, engine=engine) as arena:
        extent = arena.allocate(size)
        view = mapped_tensor(arena, extent, torch.uint8, [size])
        model = torch.zeros(size, dtype=torch.uint8)
        arena.wait(arena.write(extent, model))

        @settings(max_examples=examples(60), deadline=None)
        @given(steps)
        def interleave(todo: list[Step]) -> None:
            for kind, begin, length, value in todo:
                apply(arena, extent, view, model, (kind, begin, min(length, size - begin), value))
            whole = huge_tensor(size)
            arena.wait(arena.read(extent, whole))
            assert torch.equal(whole, model) and torch.equal(view, model)

        interleave()


def apply(arena: Arena, extent: Extent, view: torch.Tensor, model: torch.Tensor, step: Step) -> None:
    kind, begin, length, value = step
    part = slice(begin, begin + length)
    if kind == "assign":
        view[part] = value
        model[part] = value
    elif kind == "look":
        assert torch.equal(view[part], model[part])
    elif kind == "write":
        model[part] = value
        arena.wait(arena.write(extent, model[part].clone(), offset=begin))
    else:
        got = torch.empty(length, dtype=torch.uint8)
        arena.wait(arena.read(extent, got, offset=begin))
        assert torch.equal(got, model[part])


def test_a_view_is_an_ordinary_tensor(tmp_path: Path) -> None:
    with Arena([tmp_path], 2**20) as arena:
        extent = arena.allocate(3 * 5 * 2)
        half = mapped_tensor(arena, extent, torch.bfloat16, (3, 5))
        half.copy_(torch.arange(15).view(3, 5))
        parameter = torch.nn.Parameter(half)
        parameter.sum().backward()
        torch.optim.SGD([parameter], lr=1.0).step()
        saved = io.BytesIO()
        torch.save({"p": parameter}, saved)
        saved.seek(0)
        got = torch.empty(3, 5, dtype=torch.bfloat16)
        arena.wait(arena.read(extent, got))
        assert torch.equal(got, torch.arange(-1, 14).view(3, 5).bfloat16())
        assert torch.equal(torch.load(saved, weights_only=True)["p"], got)
        assert mapped_tensor(arena, arena.allocate(0), torch.float32, (0, 4)).shape == (0, 4)
        again = mapped_tensor(arena, extent, torch.bfloat16, (15,))
        assert again.data_ptr() == half.data_ptr()


def test_what_a_view_forbids(tmp_path: Path) -> None:
    with Arena([tmp_path], 2**20) as arena:
        extent, other = arena.allocate(4096), arena.allocate(4096)
        with pytest.raises(ValueError, match="takes 4100 bytes, the extent has 4096"):
            mapped_tensor(arena, extent, torch.float32, (1025,))
        view = mapped_tensor(arena, extent, torch.float32, (1024,))
        with pytest.raises(ValueError, match="clone"):
            arena.read(other, view)
        with pytest.raises(ValueError, match="mapped by a tensor"):
            arena.free(extent)
        del view
        gc.collect()
        arena.free(extent)
        with pytest.raises(ValueError, match="not of this arena"):
            mapped_tensor(arena, extent, torch.float32, (1,))


def test_a_view_outlives_the_arena(tmp_path: Path) -> None:
    with Arena([tmp_path], 2**20) as arena:
        extent = arena.allocate(4000)
        arena.wait(arena.write(extent, torch.full((1000,), 3.0)))
        view = mapped_tensor(arena, extent, torch.float32, (1000,))
    del arena
    gc.collect()
    view += 1
    assert (view == 4).all()


@pytest.mark.parametrize(
    "touch", [lambda view: view[7].item(), lambda view: view.data.fill_(1)], ids=["read", "written"]
)
def test_what_was_touched_through_a_view_is_known_until_it_is_transferred_to(tmp_path: Path, touch) -> None:  # type: ignore[no-untyped-def]
    with Arena([tmp_path], 2**21) as arena:
        extent, there = arena.allocate(2**20), huge_tensor(2**20)
        assert not arena.is_touched(extent, 0, 2**20)  # nobody maps it
        view = mapped_tensor(arena, extent, torch.uint8, (2**20,))
        arena.wait(arena.write(extent, there))
        assert arena.is_touched(extent, 0, 2**20) is not arena.direct
        touch(view)
        assert arena.is_touched(extent, 0, 2**12)
        arena.wait(arena.read(extent, there))
        assert arena.is_touched(extent, 0, 2**12)
        arena.wait(arena.write(extent, there))
        assert arena.is_touched(extent, 0, 2**20) is not arena.direct
        with pytest.raises(ValueError, match="the mapping has"):
            arena.is_touched(extent, 2**20, 2**12)
