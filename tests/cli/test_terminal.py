"""Tables: columns on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from zerograph.cli.terminal import Cell, plain_lines, progress, show_table

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
