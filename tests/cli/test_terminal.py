"""Tables: columns on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from zerograph.cli.terminal import Cell, drawable, plain_lines, progress, show_lines, show_table

ROWS: list[list[Cell]] = [[("ok", "green"), "torch", "2.13.0 " + "x" * 200], [("missing", "red"), "CUDA", "none"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_are_aligned_and_never_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert lines == plain_lines(ROWS) == ["ok       torch  2.13.0 " + "x" * 200, "missing  CUDA   none"]


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_gets_colours_unless_asked_not_to(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    show_table(ROWS)
    assert ("\x1b[32m" in out.getvalue()) is not no_color
    assert "missing" in out.getvalue()


TABLE: list[list[Cell]] = [["layer", "bytes", "why"], ["a", "5 B", "because " * 5], ["b", "12 B", ""]]


def test_numbers_stand_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    show_table(TABLE, numbers={1}, below={2})
    assert capsys.readouterr().out.splitlines()[1:] == ["a        5 B  " + ("because " * 5).rstrip(), "b       12 B"]


@pytest.mark.parametrize("columns", [30, 100])
def test_notes_stand_below_their_rows_where_the_terminal_is_narrow(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    show_table(TABLE, numbers={1}, below={2})
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    if columns == 30:
        notes = ["  because because because", "  because because"]  # words stay whole, in lines of 30 columns
        assert lines == ["layer  bytes", "a        5 B", *notes, "b       12 B"]
    else:
        assert lines == ["layer  bytes  why", f"a        5 B  {'because ' * 5}".rstrip(), "b       12 B"]


def test_notes_have_their_titles_where_numbers_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    for name, value in (("COLUMNS", "17"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)
    show_table([["row", "device", "host"], ["a", "5 GiB", "-"], ["b", "1 GiB", "7 GiB"]], {1, 2}, {1, 2}, {1, 2})
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines == ["row", "a", "  device 5 GiB", "b", "  device 1 GiB, host 7", "  GiB"]


def test_lines_are_written_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "30")
    show_lines(["x" * 100, ("[red] is no markup", "green")])
    assert "x" * 100 + "\n" in out.getvalue() and "[red] is no markup" in out.getvalue()


def test_what_an_encoding_cannot_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, can in (("utf-8", True), ("latin-1", False), ("cp437", True), ("ascii", False)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert drawable("█") is can


def test_progress_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        tell("measuring")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "measuring ...\n")


def test_progress_on_a_terminal_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "xterm-256color")
    with progress() as tell:
        tell("measuring")
    assert err.getvalue().rstrip().endswith(("\x1b[2K", "\x1b[1A\x1b[2K"))
