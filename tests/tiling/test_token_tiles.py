"""What cannot be written once for each tile."""

from __future__ import annotations

import operator

import pytest
import torch
from graphs import Builder, show

from zerograph.tiling.cuts import ROWS, Mixes
from zerograph.tiling.region import Region
from zerograph.tiling.token_tiles import write_tiles

aten = torch.ops.aten


def test_results_of_a_kernel_outside_are_refused_before_anything_changes() -> None:
    b = Builder()
    several = b.call(aten.var_mean.correction, b.input("x", 4, 3), [1])
    first = b.call(operator.getitem, several, 0)
    gm = b.output(first)
    region = Region(count=4, large=0, cuts={first: ROWS}, given={(first, several): ROWS})
    before = show(gm)
    with pytest.raises(Mixes, match="is of a kernel that is known of no layer"):
        write_tiles(gm.graph, region, 2)
    assert show(gm) == before
