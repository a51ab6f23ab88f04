"""The picture: well-formed, 900 pixels wide, and no label over another.

Tests ``cli/export/picture.py``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from overlaps import overlapping_labels
from plans import beside, plan_file

from zerograph.cli.export import svg
from zerograph.core.timeline import Forecast

NAMESPACE = "{http://www.w3.org/2000/svg}"


def parsed(path: Path) -> ElementTree.Element:
    return ElementTree.parse(path).getroot()


@pytest.mark.parametrize("layers", [1, 12, 100])
def test_a_row_per_stream_and_a_curve_per_tier(tmp_path: Path, layers: int) -> None:
    file = plan_file(layers, offload=True)
    svg.write(file, tmp_path / "plan.svg")
    root = parsed(tmp_path / "plan.svg")
    assert root.get("width") == "900"
    texts = ["".join(node.itertext()) for node in root.iter(f"{NAMESPACE}text")]
    assert {"compute", "gather", "reduce", "host → device", "device → host", "CPU update"} <= set(texts)
    assert sum(text.startswith(("Device memory", "Host memory")) for text in texts) == 2
    curves = [p for p in root.iter(f"{NAMESPACE}path") if p.get("class", "").startswith("line ")]
    assert len(curves) == 2
    assert (tmp_path / "plan.svg").stat().st_size < 250_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("layers", [1, 4, 12, 100])
def test_no_label_lies_over_another(browser: Any, tmp_path: Path, layers: int, scheme: str) -> None:
    svg.write(plan_file(layers, offload=layers > 1), tmp_path / "plan.svg")
    page = browser.new_page(viewport={"width": 900, "height": 600}, color_scheme=scheme)
    page.goto((tmp_path / "plan.svg").as_uri())
    assert overlapping_labels(page, "svg") == []
    page.screenshot(path=tmp_path / "plan.png")
    page.close()


@pytest.mark.parametrize(("share", "lines"), [(0.5, 1), (1.5, 1), (50, 0)])
def test_the_budget_is_a_line_where_it_is_near(tmp_path: Path, share: float, lines: int) -> None:
    file = plan_file(4)
    svg.write(replace(file, budget={"device": int(file.forecast.peaks["device"].bytes * share)}), tmp_path / "plan.svg")
    root = parsed(tmp_path / "plan.svg")
    assert sum(line.get("class") == "budget" for line in root.iter(f"{NAMESPACE}line")) == lines


def test_any_name_is_only_text(tmp_path: Path) -> None:
    evil = '</title><script>alert("\x00")</script>&' + "x" * 200
    file = plan_file(1)
    spans = tuple(replace(span, name=evil) for span in file.forecast.spans)
    svg.write(replace(file, model=evil, forecast=replace(file.forecast, spans=spans)), tmp_path / "plan.svg")
    assert not list(parsed(tmp_path / "plan.svg").iter(f"{NAMESPACE}script"))


def test_a_plan_without_instructions(tmp_path: Path) -> None:
    svg.write(replace(plan_file(1), forecast=Forecast((), {}, {})), tmp_path / "plan.svg")
    assert "no instructions" in "".join(parsed(tmp_path / "plan.svg").itertext())


def test_a_run_is_drawn_below_on_the_same_scale(browser: Any, tmp_path: Path) -> None:
    file = plan_file(4, update=True)
    svg.write(file, tmp_path / "plan.svg", beside(file, 2.0))
    root = parsed(tmp_path / "plan.svg")
    texts = ["".join(node.itertext()) for node in root.iter(f"{NAMESPACE}text")]
    assert texts.count("forecast") == texts.count("measured") == 1 and texts.count("compute") == 2
    assert any("re-timed 138 ms · measured 138 ms" in text for text in texts)
    bars = [r for r in root.iter(f"{NAMESPACE}rect") if r.get("class") == "compute"]
    half = len(bars) // 2
    ends = [float(bar.get("x", 0)) + float(bar.get("width", 0)) - svg.LEFT for bar in (bars[half - 1], bars[-1])]
    assert ends[1] == pytest.approx(svg.PLOT, abs=1) and ends[0] == pytest.approx(svg.PLOT / 2, abs=1)
    page = browser.new_page(viewport={"width": 900, "height": 800})
    page.goto((tmp_path / "plan.svg").as_uri())
    assert overlapping_labels(page, "svg") == []
    page.screenshot(path=tmp_path / "plan.png")
    page.close()
