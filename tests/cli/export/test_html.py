"""The page, in a real browser: it renders, mouse and keyboard both work, and no name in a plan can do harm.

Tests ``cli/export/page_data.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from overlaps import overlapping_labels
from plans import beside, plan_file

from zerograph.cli.export import html
from zerograph.core.planfile import PlanFile
from zerograph.core.runfile import Beside
from zerograph.core.timeline import Forecast, Span

SIZE = {"width": 1280, "height": 900}
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
    names = shown.get_by_role("rowheader").all_inner_texts()
    assert sorted(names) == sorted(h.name for h in file.holdings if h.held_at(span.start, file.forecast.spans))
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


def test_repeated_layers_are_folded(opened: Opener) -> None:
    page = opened(plan_file(12))
    rows = page.locator("#modules tbody tr")
    before = rows.count()
    fold = page.get_by_role("button", name="What is in 0–11")
    fold.press("Enter")
    assert rows.count() == before + 12 and fold.get_attribute("aria-expanded") == "true"
    page.get_by_role("button", name="3", exact=True).click()
    assert page.locator("#timeline .task:not(.faint)").count() == 5, "two gathers, two computations, a reduction"
    fold.click()
    assert rows.count() == before
    page.keyboard.press("Escape")
    assert page.locator("#timeline .faint").count() == 0


def test_tensors_of_repeated_layers_are_folded(opened: Opener) -> None:
    page = opened(plan_file(12))
    page.get_by_role("button", name=re.compile(r"^backward blocks\.11, compute")).click()
    held = page.locator("#instruction tbody tr")
    assert held.count() == 4 and "12 activation" not in held.nth(1).inner_text()
    page.get_by_role("button", name="Each of 12 blocks.*.saved").click()
    assert held.count() == 16


def test_all_instructions_are_a_table(opened: Opener) -> None:
    page = opened(plan_file(12))
    page.get_by_text("instructions in program order").click()
    table = page.locator("#all table")
    table.wait_for()  # the browser says later that the summary was opened
    assert table.locator("tbody tr").count() == len(plan_file(12).forecast.spans)
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


@pytest.mark.parametrize("width", [360, 900, 2200])
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
    told = page.locator("#instruction").inner_text()
    assert "A run tells how much is held, and not what." in told and "Critical path" not in told
    assert "for 20 ms" in told
