"""The tree of modules: repeated layers are one row, and nothing is lost.

Tests ``cli/export/labels.py``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import plan_file

from zerograph.cli.export.labels import picture_seconds
from zerograph.cli.export.modules import module_tree, most_held
from zerograph.core.files.planfile import Holding


def test_repeated_layers_are_one_row() -> None:
    file = plan_file(12)
    blocks, rest = module_tree(file)
    (group,) = blocks.children
    assert (blocks.label, group.label, len(group.paths)) == ("blocks", "0-11", 12)
    assert [layer.label for layer in group.children] == [str(i) for i in range(12)]
    assert sum(group.seconds()) == pytest.approx(sum(s.end - s.start for s in file.forecast.spans))
    assert [h.name for h in rest.holdings] == ["shards"]
    assert group.children[3].reasons[0].subject == "blocks.3"


def test_layers_of_another_shape_stay_separate() -> None:
    file = plan_file(6)
    held = tuple(Holding("x", "activation", "device", 1, 0, 1, f"blocks.{i}.moe.gate") for i in (1, 2, 5))
    (blocks, _) = module_tree(replace(file, holdings=file.holdings + held))
    assert [child.label for child in blocks.children] == ["0, 3-4", "1-2, 5"]


def test_a_bucket_over_several_modules_is_one_row() -> None:
    file = plan_file(2)
    first = replace(file.forecast.spans[0], module="blocks.0.norm .. head")
    spans = (first, *file.forecast.spans[1:])
    tree = module_tree(replace(file, forecast=replace(file.forecast, spans=spans)))
    assert [row.label for row in tree] == ["blocks.0.norm .. head", "blocks", ""]


def test_layers_of_other_decisions_stay_separate() -> None:
    file = plan_file(6)
    first = replace(file.reasons[1], decision="step")  # of blocks.0
    (blocks, _) = module_tree(replace(file, reasons=(file.reasons[0], first, *file.reasons[2:])))
    assert [child.label for child in blocks.children] == ["0", "1-5"]


def test_most_held() -> None:
    held = [
        Holding("all", "param", "device", 10, -1, -1),
        Holding("a", "activation", "device", 5, 0, 2),
        Holding("b", "activation", "device", 7, 3, -1),
    ]
    assert most_held(held, 4) == 17 and most_held(held[:2], 4) == 15 and most_held([], 4) == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5212, "1.52 s"),
        (0.9999, "1 s"),
        (0.004, "4 ms"),
        (2.5e-5, "25 µs"),
        (3e-9, "3 ns"),
        (1234, "1234 s"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert picture_seconds(seconds) == text
