"""Plans of models by the command line, where it finds a GPU and on a CPU: `python plans.py MODEL...`, in a process with
the shim loaded. The last line that is written is JSON: by model and device, the forecast's peak in bytes, and seconds.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pretend
import segments
from click.testing import CliRunner

from zerograph.cli import main
from zerograph.core.files.planfile import PlanFile


def gpt2() -> tuple[Any, Any]:
    return segments.gpt2(), segments.batch("gpt2")


def llama() -> tuple[Any, Any]:
    return segments.llama(), segments.batch("llama")


def vit() -> tuple[Any, Any]:
    return segments.vit(), segments.batch("vit")


def planned(name: str, *options: str) -> tuple[int, float]:
    given = ["plan", f"{__file__}:{name}", "--world", "4", "--dtype", "bfloat16", "--json", *options]
    found = CliRunner().invoke(main, given, catch_exceptions=False)
    assert found.exit_code == 0, found.stderr
    forecast = PlanFile.from_json(found.stdout).forecast
    return forecast.peaks["device"].bytes, forecast.seconds


if __name__ == "__main__":
    pretend.pretend((9, 0))
    os.environ.pop("LD_PRELOAD", None)
    on_cpu = ("--device", "cpu")
    print(json.dumps({name: {"cuda": planned(name), "cpu": planned(name, *on_cpu)} for name in sys.argv[1:]}))
