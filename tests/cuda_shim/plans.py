"""Plans of models by the command line, where it finds a GPU and on a CPU; for `server.py`."""

from __future__ import annotations

from typing import Any

import pretend
import segments
from click.testing import CliRunner

from zerograph import cli
from zerograph.core.files.planfile import PlanFile


def gpt2() -> tuple[Any, Any]:
    return segments.gpt2(), segments.batch("gpt2")


def llama() -> tuple[Any, Any]:
    return segments.llama(), segments.batch("llama")


def vit() -> tuple[Any, Any]:
    return segments.vit(), segments.batch("vit")


def planned(name: str, *options: str) -> tuple[int, float]:
    given = ["plan", f"{__file__}:{name}", "--world", "4", "--dtype", "bfloat16", "--json", *options]
    found = CliRunner().invoke(cli.main, given, catch_exceptions=False)
    assert found.exit_code == 0, found.stderr
    forecast = PlanFile.from_json(found.stdout).forecast
    return forecast.peaks["device"].bytes, forecast.seconds


def main(*names: str) -> dict[str, Any]:
    """By model and device, the forecast's peak in bytes, and seconds."""
    pretend.pretend((9, 0))
    return {name: {"cuda": planned(name), "cpu": planned(name, "--device", "cpu")} for name in names}
