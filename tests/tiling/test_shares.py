"""Tiles of a dimension that is divided among ranks: the parts of all tiles, put together, are the whole."""

from __future__ import annotations

import pytest
import torch
from graphs import Builder
from torch import fx

from zerograph.core.plan import tile_rows
from zerograph.graph.ops import PLACE, VIEW
from zerograph.tiling.shares import Shares


class Run(fx.Interpreter):
    """Runs views and places of tiles, as the executor does."""

    def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
        if target is VIEW:
            source, dim, begin, end = args
            return source.narrow(dim, begin, end - begin)
        if target is PLACE:
            (tile,), into, shape, dim, begin = args
            sizes = [own if size < 0 else size for size, own in zip(shape, tile.shape, strict=True)]
            full = torch.full(sizes, torch.nan) if into is None else into.clone()
            full.narrow(dim, begin, tile.shape[dim]).copy_(tile)
            return full
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize(("size", "ranks", "tiles"), [(8, 2, 2), (7, 2, 3), (9, 4, 3), (5, 4, 2), (6, 1, 4)])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_parts_put_together_are_the_whole(size: int, ranks: int, tiles: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = size
    b = Builder(ranks)
    x = b.input("x", *shape)
    shares = Shares(b.graph, size, ranks)
    wide, into, parts = shares.wide(x, dim), None, []
    for begin, end in tile_rows(shares.share, tiles):
        parts.append(shares.part(wide, dim, begin, end))
        into = shares.place(parts[-1], into, dim, begin, end)
    assert into is not None
    full = shares.full(into, dim)
    gm = b.output(full, *parts)
    value = torch.randn(shape)
    found, *own = Run(gm).run(value)
    assert torch.equal(found, value)
    assert [node.meta["val"].shape for node in (full, *parts)] == [one.shape for one in (found, *own)]


def test_what_is_not_contiguous_is_copied_and_so_is_what_is_to_be() -> None:
    def copies(transposed: bool, wanted: bool) -> int:
        b = Builder()
        x: fx.Node = b.input("x", 4, 6)
        if transposed:
            x = b.call(torch.ops.aten.permute.default, x, [1, 0])
        Shares(b.graph, x.meta["val"].shape[1], 2).wide(x, 1, copies=wanted)
        return len(b.graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default))

    assert [copies(*asked) for asked in ((False, False), (True, False), (False, True))] == [0, 1, 1]
