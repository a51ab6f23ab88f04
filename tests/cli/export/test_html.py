"""The page, in a real browser: it renders, mouse and keyboard both work, and no name in a plan can do harm.

Tests ``cli/export/page_data.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from overlaps import overlapping_labels
from plans import MIB, Task, beside, plan_file, play

from zerograph.cli.export import html
from zerograph.core.files.planfile import Holding, PlanFile
from zerograph.core.files.runfile import Beside
from zerograph.core.timeline import Forecast, Span

SIZE = {"width": 1280, "height": 900}
NARROW_ROW = 120
"""Pixels: at 400 of them a row was 200 high when it was as many columns as on a wide screen."""
Opener = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opener]:
    """A function that writes a plan's page and opens it; in the end nothing may have been logged or requested."""
    heard: list[str] = []
    pages: list[Any] = []

    def open_page(file: PlanFile, scheme: str = "light", size: dict[str, int] = SIZE, run: Beside | None = None) -> Any:
        path = tmp_path / "plan.html"
        html.write(file, path, run)
        page = browser.new_page(viewport=size, color_scheme=scheme)
        pages.append(page)
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.on("request", lambda asked: asked.url == path.as_uri() or heard.append(asked.url))
        page.goto(path.as_uri())
        page.wait_for_selector("#timeline svg, #timeline p")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert heard == []


def tasks(page: Any) -> Any:
    return page.locator("#timeline .task")


def ticks(page: Any) -> list[str]:
    labels: list[str] = page.locator("#timeline svg > text").all_text_contents()
    return labels


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("layers", [1, 12, 100])
def test_it_renders(opened: Opener, tmp_path: Path, layers: int, scheme: str) -> None:
    file = plan_file(layers, offload=layers > 1)
    page = opened(file, scheme)
    assert (tmp_path / "plan.html").stat().st_size < 1_000_000
    assert tasks(page).count() == len(file.forecast.spans)
    assert page.locator("#timeline .curve").count() == len(file.forecast.memory)
    assert page.locator("#timeline .peak").count() == len(file.forecast.memory)
    assert overlapping_labels(page, "#timeline svg") == []
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    tasks(page).nth(layers).press("Enter")
    page.screenshot(path=tmp_path / "selected.png", full_page=True)
    assert (tmp_path / "selected.png").stat().st_size > (tmp_path / "page.png").stat().st_size > 20_000


def test_a_click_shows_what_is_held(opened: Opener) -> None:
    file = plan_file(4)
    page = opened(file)
    backward = page.get_by_role("button", name=re.compile(r"^backward blocks\.2, compute"))
    backward.click()
    span = next(s for s in file.forecast.spans if s.name == "backward blocks.2")
    shown = page.locator("#instruction")
    assert shown.get_by_role("heading").inner_text() == "backward blocks.2"
    for fact in ("blocks.2", "model.py:42", "for 10 ms", "gather blocks.2", "reduce blocks.2"):
        assert fact in shown.inner_text()
    seen = [cell.split("\n") for cell in shown.get_by_role("rowheader").all_inner_texts()]
    assert ["blocks.2.saved", "blocks.2 · model.py:42"] in seen, "where a tensor comes from stands beside its name"
    assert sorted(name for name, *_ in seen) == sorted(
        h.name for h in file.holdings if h.held_at(span.start, file.forecast.spans)
    )
    assert backward.get_attribute("aria-pressed") == "true"
    assert "backward blocks.2 is selected" in page.get_by_role("status").inner_text()
    backward.click()
    assert shown.get_by_role("heading").inner_text() == "Instruction"


def test_mouse_zooms_and_pans(opened: Opener) -> None:
    page = opened(plan_file(12))
    everything = ticks(page)
    box = page.locator("#timeline").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    page.mouse.wheel(0, -400)
    page.wait_for_function("() => document.querySelector('#timeline svg > text').textContent !== '0 ms'")
    near = ticks(page)
    assert near != everything
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2 - 200, box["y"] + 60, steps=4)
    page.mouse.up()
    assert ticks(page) != near
    assert page.locator("#instruction h2").inner_text() == "Instruction", "a drag selects nothing"
    page.get_by_role("button", name="All", exact=True).click()
    assert ticks(page) == everything


def test_when_everything_is_shown_the_wheel_scrolls_the_page(opened: Opener) -> None:
    page = opened(plan_file(12))
    page.locator("#timeline").hover()
    page.mouse.wheel(0, 300)
    page.wait_for_function("() => scrollY > 0")


def test_the_keyboard_does_everything(opened: Opener) -> None:
    page = opened(plan_file(12))
    everything = ticks(page)
    page.locator("#timeline").focus()
    page.keyboard.press("+")
    near = ticks(page)
    assert near != everything
    page.keyboard.press("ArrowRight")
    assert ticks(page) != near
    page.keyboard.press("ArrowLeft")
    assert ticks(page) == near
    page.keyboard.press("-")
    assert ticks(page) == everything
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert ticks(page) == everything

    def focused() -> str:
        return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))

    page.keyboard.press("Tab")
    assert focused().startswith("forward blocks.0, compute, 5 ms")
    page.keyboard.press("Tab")
    assert focused().startswith("forward blocks.1, compute")
    page.keyboard.press("ArrowDown")
    assert ", gather" in focused()
    page.keyboard.press("+")
    assert ", gather" in focused(), "the focus stays where it was when all is drawn anew"
    page.keyboard.press("Enter")
    name = page.locator("#instruction h2").inner_text()
    assert name.startswith("gather blocks.") and focused().startswith(name)
    page.keyboard.press("Escape")
    assert page.locator("#instruction h2").inner_text() == "Instruction"


def test_the_timeline_can_be_skipped(opened: Opener) -> None:
    page = opened(plan_file(12))
    skip = page.get_by_role("link", name="Skip the timeline")
    skip.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#timeline')") is None


def test_short_instructions_are_one_bar_until_one_comes_near(opened: Opener) -> None:
    spans = tuple(Span(i, f"op {i}", "compute", i * 1e-5, (i + 1) * 1e-5) for i in range(3000))
    forecast = Forecast(spans, {}, {}, (0, 2999))
    page = opened(replace(plan_file(1), forecast=forecast, holdings=()))
    bars = tasks(page)
    assert bars.count() < 300
    assert "Enter zooms in" in bars.first.get_attribute("aria-label")
    while "Enter zooms in" in tasks(page).first.get_attribute("aria-label"):
        tasks(page).first.press("Enter")
    tasks(page).first.press("Enter")
    assert page.locator("#instruction h2").inner_text() == "op 0"
    assert "names nothing that is held" in page.locator("#instruction").inner_text()


BANDS = """() => [...document.querySelectorAll('#timeline .kind')].map((band) => {
    const points = band.getAttribute('d').slice(1, -1).split('L').map((point) => point.split(' ').map(Number));
    return [points.slice(points.length / 2).reverse(), points.slice(0, points.length / 2)];
})"""
CURVE = """() => document.querySelector('#timeline .curve').getAttribute('d').slice(1).split('L').map(
    (point) => point.split(' ').map(Number))"""
Points = list[list[float]]


def bands(page: Any) -> list[tuple[Points, Points]]:
    """Lower and upper corners of each band of the only tier, the lowest band first."""
    return [(low, high) for low, high in page.evaluate(BANDS)]


def switches(page: Any) -> dict[str, Any]:
    """The kinds' switches by their first word."""
    found = page.locator("#kinds button")
    return {found.nth(i).inner_text().split()[0]: found.nth(i) for i in range(found.count())}


def test_memory_is_stacked_by_kind(opened: Opener) -> None:
    file = plan_file(4, update=True)
    page = opened(file)
    found = bands(page)
    bottom = found[0][0][0][1]
    assert all(y == bottom for _, y in found[0][0]), "the lowest stands on the axis"
    for (_, below), (above, _) in pairwise(found):
        assert below == above
    assert found[-1][1] == page.evaluate(CURVE), "the sum of kinds is the curve at every instant"
    text = {name: switch.inner_text() for name, switch in switches(page).items()}
    assert text == {
        "parameters": "parameters 48 MiB",
        "gathered": "gathered parameters 48 MiB",
        "activations": "activations 24 MiB",
    }
    peak, sizes = file.forecast.peaks["device"].bytes, {48, 24}
    assert peak == 120 * MIB
    scale = peak / (bottom - min(y for _, y in found[-1][1]))
    shown = {round(max(low - high for (_, low), (_, high) in zip(*band, strict=True)) * scale / MIB) for band in found}
    assert shown == sizes
    assert (
        "of it parameters 48 MiB, gathered parameters 48 MiB, activations 24 MiB"
        in page.locator("main").aria_snapshot()
    )


def test_kinds_are_switched_off_and_on_with_keys(opened: Opener) -> None:
    page = opened(plan_file(1))
    before, curve = bands(page), page.evaluate(CURVE)
    page.locator("#timeline .task").last.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent").startswith("parameters")
    page.keyboard.press("Space")
    assert switches(page)["parameters"].get_attribute("aria-pressed") == "false"
    after = bands(page)
    assert len(after) == len(before) - 1
    bottom = before[0][0][0][1]
    assert all(y == bottom for _, y in after[0][0]), "what is left is stacked anew"
    title = page.locator("#timeline svg").text_content()
    assert "up to 54 MiB of 2 kinds of 3" in title and page.locator("#timeline .peak").count() == 0
    page.keyboard.press("Space")
    assert bands(page) == before and page.evaluate(CURVE) == curve
    for switch in switches(page).values():
        switch.click()
    assert bands(page) == [] and "up to 0 B of 0 kinds of 3" in page.locator("#timeline svg").text_content()


def test_what_nothing_explains_is_a_kind_of_its_own(opened: Opener) -> None:
    page = opened(plan_file(4, offload=True))
    assert "not" in switches(page) and "optimizer" in switches(page)
    page.locator("#timeline svg > [role=img]").first.hover()
    assert re.search(r"device [\d.]+ MiB: .*parameters 48 MiB", page.locator("#readout").inner_text())


def test_a_plan_that_names_no_tensor_says_so(opened: Opener) -> None:
    page = opened(replace(plan_file(4), holdings=()))
    assert page.locator("#timeline .kind").count() == 0 and page.locator("#timeline .area").count() == 1
    assert "Device memory is one curve: the plan names nothing that it holds." in page.locator("#kinds").inner_text()


def test_an_evaluation_of_one_layer(opened: Opener) -> None:
    forward = (Task("gather blocks.0", "gather", 0.1), Task("inference blocks.0", "compute", 0.1, (0,)))
    held = (Holding("w", "gathered", "device", MIB, 0, 1), Holding("x", "input", "device", MIB, -1, -1))
    page = opened(replace(plan_file(1), forecast=play(forward, held), holdings=held))
    assert list(switches(page)) == ["gathered", "inputs"]
    page.get_by_text("instructions in program order").click()
    page.locator("#all table").wait_for()
    assert page.locator("#all tbody tr").count() == 2


@pytest.mark.parametrize("layers", [12, 100])
def test_what_runs_at_the_peak_bears_its_name(opened: Opener, layers: int) -> None:
    file = plan_file(layers, update=True)
    page = opened(file)
    peak = file.forecast.peaks["device"]
    then = file.forecast.spans[peak.task].start
    running = {span.name for span in file.forecast.spans if span.start <= then < span.end}
    texts = set(page.locator("#timeline .flag text").all_text_contents())
    texts |= set(page.locator("#timeline .task text").all_text_contents())
    assert peak.name in running and running <= texts
    assert overlapping_labels(page, "#timeline svg") == []


def test_instructions_of_repeated_layers_are_collapsed(opened: Opener) -> None:
    file = plan_file(100, update=True)
    spans = list(file.forecast.spans)
    odd = next(i for i, span in enumerate(spans) if span.name == "forward blocks.40")
    spans[odd] = replace(spans[odd], end=spans[odd].end + 1e-3)
    page = opened(replace(file, forecast=replace(file.forecast, spans=tuple(spans))))
    page.get_by_text("instructions in program order").click()
    rows = page.locator("#all tbody tr")
    page.locator("#all table").wait_for()
    names = [name.removeprefix("▸").strip() for name in rows.get_by_role("rowheader").all_inner_texts()]
    assert names == [
        "forward blocks.0 to blocks.39 (40 alike)",
        "gather blocks.40",
        "forward blocks.40",
        "forward blocks.41 to blocks.99 (59 alike)",
        "backward blocks.99 to blocks.0 (100 alike)",
        "optimizer update",
    ], "a layer that differs stands alone"
    page.get_by_role("button", name="What is in backward blocks.99 to").press("Enter")
    assert rows.count() == 6 + 100
    page.get_by_role("button", name="What is in backward blocks.57", exact=True).press("Enter")
    assert rows.count() == 6 + 100 + 3
    rows.get_by_role("button", name="reduce blocks.57").click()
    assert page.locator("#instruction h2").inner_text() == "reduce blocks.57"
    page.get_by_role("button", name="What is in backward blocks.99 to").click()
    assert rows.count() == 6


def test_layers_of_other_decisions_are_rows_of_their_own(opened: Opener) -> None:
    file = plan_file(12)
    page = opened(replace(file, reasons=tuple(r for r in file.reasons if r.subject not in ("blocks.0", "blocks.11"))))
    names = page.locator("#modules tbody th").all_inner_texts()
    assert [name.removeprefix("▸").strip() for name in names[1:3]] == ["0, 11 (2 alike)", "1 to 10 (10 alike)"]


def test_repeated_layers_are_collapsed(opened: Opener) -> None:
    page = opened(plan_file(12))
    rows = page.locator("#modules tbody tr")
    before = rows.count()
    toggle = page.get_by_role("button", name="What is in 0 to 11")
    toggle.press("Enter")
    assert rows.count() == before + 12 and toggle.get_attribute("aria-expanded") == "true"
    page.get_by_role("button", name="3", exact=True).click()
    assert page.locator("#timeline .task:not(.faint)").count() == 5, "two gathers, two computations, a reduction"
    toggle.click()
    assert rows.count() == before
    page.keyboard.press("Escape")
    assert page.locator("#timeline .faint").count() == 0


def test_tensors_of_repeated_layers_are_collapsed(opened: Opener) -> None:
    page = opened(plan_file(12))
    page.get_by_role("button", name=re.compile(r"^backward blocks\.11, compute")).click()
    held = page.locator("#instruction tbody tr")
    assert held.count() == 6, "of the twelve that are saved, four come from each line"
    each = page.get_by_role("button", name="What is in each of 4 blocks.*.saved")
    assert each.count() == 3
    each.first.click()
    assert held.count() == 10
    each.first.click()
    assert held.count() == 6


def test_tensors_of_nodes_are_collapsed_by_where_they_come_from(opened: Opener) -> None:
    """Names of nodes count on from layer to layer: ``mul``, ``mul_1``."""
    file = plan_file(1)
    made = [(i, where) for i in range(5) for where in ("up", "down")]
    nodes = [
        Holding(
            f"mul_{n}" if n else "mul",
            "activation",
            "device",
            MIB,
            0,
            1,
            f"blocks.{i}.{where}",
            f"model.py:{len(where)}",
        )
        for n, (i, where) in enumerate(made)
    ]
    page = opened(replace(file, holdings=tuple(nodes)))
    tasks(page).first.press("Enter")
    held = page.locator("#instruction tbody tr").get_by_role("rowheader").all_inner_texts()
    assert [row.removeprefix("▸").strip().split("\n") for row in held] == [
        ["mul_* ×5", "blocks.*.up · model.py:2"],
        ["mul_* ×5", "blocks.*.down · model.py:4"],
    ]


def test_all_instructions_are_a_table(opened: Opener) -> None:
    page = opened(plan_file(12))
    page.get_by_text("instructions in program order").click()
    table = page.locator("#all table")
    table.wait_for()  # the browser says later that the summary was opened
    assert table.locator("tbody tr").count() == 2, "the forward and the backward of all layers"
    table.get_by_role("button", name="What is in backward blocks.11 to").click()
    table.get_by_role("button", name="What is in backward blocks.7").click()
    table.get_by_role("button", name="reduce blocks.7").press("Enter")
    assert page.locator("#instruction h2").inner_text() == "reduce blocks.7"


def test_everything_that_can_be_pressed_has_a_name(opened: Opener) -> None:
    page = opened(plan_file(4, offload=True))
    nameless = """[...document.querySelectorAll('button, a, [tabindex="0"]')].filter((node) =>
        !(node.getAttribute('aria-label') || node.getAttribute('aria-labelledby') || node.textContent.trim()))"""
    assert page.evaluate(f"{nameless}.length") == 0
    tree = page.locator("main").aria_snapshot()
    assert "Zoom in" in tree and "compute stream" in tree and "device memory over time: peak" in tree


@pytest.mark.parametrize(
    "evil", ["</script><script>window.harm=1</script>", "'\"><img src=x onerror=harm=1>", "{{data}}"]
)
def test_names_do_no_harm(opened: Opener, evil: str) -> None:
    file = plan_file(1)
    spans = tuple(replace(span, name=evil, module=evil, source=evil) for span in file.forecast.spans)
    holdings = tuple(replace(holding, name=evil, module=evil) for holding in file.holdings)
    reasons = tuple(replace(reason, subject=evil, decision=evil, why=evil) for reason in file.reasons)
    forecast = replace(file.forecast, spans=spans, not_counted=(evil,))
    page = opened(replace(file, model=evil, forecast=forecast, holdings=holdings, reasons=reasons))
    tasks(page).first.press("Enter")
    assert page.get_by_role("heading", level=1).inner_text() == evil
    assert page.locator("#instruction h2").inner_text() == evil
    assert page.evaluate("window.harm") is None
    assert page.locator("img").count() == 0


def test_a_plan_without_instructions(opened: Opener) -> None:
    page = opened(replace(plan_file(1), forecast=Forecast((), {}, {}), holdings=(), reasons=()))
    assert page.locator("#timeline").inner_text() == "This plan has no instructions."
    assert not page.get_by_role("button", name="Zoom in").is_visible()


@pytest.mark.parametrize(("share", "lines"), [(0.5, 1), (1.5, 1), (50, 0)])
def test_the_budget_is_a_line_where_it_is_near(opened: Opener, share: float, lines: int) -> None:
    file = plan_file(4)
    budget = int(file.forecast.peaks["device"].bytes * share)
    page = opened(replace(file, budget={"device": budget}))
    assert page.locator("#timeline .budget").count() == lines
    assert page.locator(".tiles .over").count() == (share < 1)
    assert f"{100 / share:.0f}% used" in page.locator("#timeline svg").text_content()


def test_rows_stay_low_on_a_narrow_screen(opened: Opener) -> None:
    page = opened(plan_file(12, offload=True), size={"width": 400, "height": 900})
    page.get_by_text("instructions in program order").click()
    page.get_by_role("button", name="What is in 0 to 11").click()
    page.get_by_role("button", name=re.compile(r"^backward blocks\.11, compute")).press("Enter")
    page.locator("#all table").wait_for()
    heights = "(place) => [...document.querySelectorAll(place + ' tbody tr')].map((row) => row.offsetHeight)"
    for place in ("#modules", "#instruction", "#all", "#reasons"):
        found = page.evaluate(heights, place)
        assert found and max(found) <= NARROW_ROW, place
    inner = "[...document.querySelectorAll('.wide')].filter((box) => box.scrollWidth > box.clientWidth).length"
    assert page.evaluate(inner) == 0, "no table scrolls sideways"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#modules").get_by_role("rowheader").count() >= 12, "it is a table for those who hear it"


@pytest.mark.parametrize("width", [360, 400, 900, 2200])
def test_any_width(opened: Opener, width: int) -> None:
    page = opened(plan_file(12, offload=True), size={"width": width, "height": 900})
    assert overlapping_labels(page, "#timeline svg") == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def test_it_prints_dark_on_white(opened: Opener) -> None:
    page = opened(plan_file(12), "dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_stands_below_the_plan(opened: Opener, tmp_path: Path, scheme: str) -> None:
    file = plan_file(12, update=True)
    page = opened(file, scheme, run=beside(file, 2.0))
    assert page.locator("#timeline .task").count() > len(file.forecast.spans)
    groups = page.locator("#timeline svg > [role=group]")
    lanes = [groups.nth(i).get_attribute("aria-label") for i in range(groups.count())]
    assert lanes == [f"{stream}{run} stream" for run in ("", ", run") for stream in ("compute", "gather", "reduce")]
    assert page.locator("#timeline .curve").count() == 2
    assert "Measured device memory" in page.locator("#timeline svg").text_content()
    tiles = page.locator(".tiles").inner_text()
    assert "378 ms" in tiles and "2.00 times the forecast" in tiles
    assert overlapping_labels(page, "#timeline svg") == []
    colours = {
        page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}')").strip()
        for name in ("compute", "measured-compute")
    }
    assert len(colours) == 1 and all(colours)
    page.screenshot(path=tmp_path / "measured.png", full_page=True)
    page.get_by_role("button", name=re.compile(r"^backward blocks\.2, compute, run")).click()
    assert "Measured device memory is one curve: a run tells how much is held" in page.locator("#kinds").inner_text()
    seen = page.locator("#instruction").inner_text()
    assert "A run tells how much is held, and not what." in seen and "Critical path" not in seen
    assert "for 20 ms" in seen
