"""README, docs and ``--help``: links lead somewhere, prose names its nouns, guides name no source files."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from zerograph.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [ROOT / "README.md", *GUIDE, *sorted((ROOT / "docs" / "internals").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OPENING = re.compile(r"(?:^|[.:;!?] |\| |[-*] |\d\. )(?:What|Whatever|Of)\b[^\n]*", re.MULTILINE)
_SOURCE = re.compile(r"\b(?:zerograph|runtime|passes|planner|compiler|core|graph|tests)/[\w/]+\.py\b|\bcsrc/")


def prose(page: Path) -> str:
    """The page without its code blocks, indented ones too."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return "\n".join(line for line in text.splitlines() if not line.startswith("    "))


def anchors(page: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in _LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (fragment and target.suffix == ".md" and fragment not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_name_their_noun(page: Path) -> None:
    assert _OPENING.findall(prose(page)) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_texts_name_their_noun(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    texts = [" ".join((command.help or "").split())]
    texts += [option.help or "" for option in command.params if isinstance(option, click.Option)]
    assert [text for text in texts if _OPENING.search(text)] == []


def test_guides_name_no_source_files() -> None:
    assert {page.name: found for page in GUIDE if (found := _SOURCE.findall(page.read_text()))} == {}


def test_the_index_lists_every_guide() -> None:
    listed = set(_LINK.findall((ROOT / "docs" / "guide" / "index.md").read_text()))
    assert {page.name for page in GUIDE} - listed <= {"index.md", "reference.md"}  # `make docs` fills the latter


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
