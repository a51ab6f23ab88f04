"""How tensors lie over ranks, and what brings them from one layout to another."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from zerograph.core.layout import Layout, Portion, split_dimension, transition
from zerograph.core.step import Param

CHANGES = {
    ("rows", "whole"): "all-gather",
    ("term", "rows"): "reduce-scatter",
    ("term", "whole"): "all-reduce",
}


@pytest.mark.parametrize("source", get_args(Portion))
@pytest.mark.parametrize("target", get_args(Portion))
def test_only_what_ranks_lack_takes_a_collective(source: Portion, target: Portion) -> None:
    assert transition(source, target) == CHANGES.get((source, target))


@pytest.mark.parametrize(
    ("sharded", "gather", "reduction"), [(True, "all-gather", "reduce-scatter"), (False, None, "all-reduce")]
)
def test_a_parameter_is_gathered_and_its_gradient_reduced_as_it_lies(
    sharded: bool, gather: Any, reduction: str
) -> None:
    param = Param("w", (6, 2), *["float32"] * 3, True, Layout.home(4, sharded=sharded))
    assert (param.sharded, param.gather, param.reduction) == (sharded, gather, reduction)
    assert param.padded_elements == (16 if sharded else 12)


@pytest.mark.parametrize(
    ("part", "ranks"), [("columns", 2), (True, 2), ("rows", 0), ("rows", True), ("whole", 1.0), ("term", None)]
)
def test_what_a_file_says_is_a_layout_or_refused(part: Any, ranks: Any) -> None:
    with pytest.raises(ValueError, match=f"{part!r} over {ranks!r} ranks is no layout"):
        Layout(part, ranks)


def test_only_rows_are_divided() -> None:
    rows, whole = Layout("rows", 3), Layout("whole", 3)
    assert ([rows.rows(7, rank) for rank in range(3)], rows.most(7)) == ([slice(0, 3), slice(3, 6), slice(6, 7)], 3)
    assert (whole.rows(7, 2), whole.most(7)) == (slice(0, 7), 7)
    assert rows.over(3) is rows and str(rows.over(1)) == "rows over 1 rank" and str(whole) == "whole over 3 ranks"


def test_few_rows_are_split_along_another_dimension() -> None:
    assert split_dimension((8, 2), 4) == 0 and split_dimension((4,), 4) == 0
    assert split_dimension((2, 8, 3), 4) == 1 and split_dimension((2, 3, 4), 4) == 2
    assert split_dimension((8, 8, 3), 4) == 0 and split_dimension((8, 8, 3), 4, by_rows=False) == 1
    assert split_dimension((1, 3, 4), 4) is None and split_dimension((1, 3, 4), 4, by_rows=False) == 2
    # Matrices and vectors are small then, and the last has no dimension that four divide.
    assert [split_dimension(shape, 4) for shape in ((2, 8), (3,), (), (2, 3, 5))] == [None] * 4
