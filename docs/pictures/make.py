"""Make the pictures of README.md and of docs/guide/tiling.md: ``make pictures``, or ``python docs/pictures/make.py``.

GPTs are planned, and ``zerograph show`` runs in a terminal of its own (a pty); nothing is drawn by hand.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT  # rich exports no other way to leave its web fonts out
from rich.console import Console
from rich.text import Text

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

COLUMNS, ROWS = 108, 60
LARGEST = 200_000
"""Bytes of a picture, at most: they are in the repository."""
RANKS = ["--world", "8", "--machine", "a100-40gb", "--dtype", "bfloat16"]
PLAN = [*RANKS, "--bucket-size", "128MiB"]
UNTILED = [*RANKS, "--bucket-size", "16MiB"]
TILED = [*UNTILED, "--tile", "4", "--loss-tiles", "8"]


def gpt() -> tuple[Any, tuple[Any, Any]]:
    """The examples' GPT of 0.7 B parameters, with inputs and targets."""
    import torch
    from gpt import GPT, Config

    tokens = torch.zeros(2, 1024, dtype=torch.int64)
    return GPT(Config(vocab=50257, context=1024, layers=12, heads=16, width=2048)), (tokens, tokens)


def wide() -> tuple[Any, tuple[Any, Any]]:
    """Two layers of it, twice as wide: weights of 128 MiB in 16 bits, logits of 3.1 GiB in 32."""
    import torch
    from gpt import GPT, Config

    tokens = torch.zeros(16, 1024, dtype=torch.int64)
    return GPT(Config(vocab=50257, context=1024, layers=2, heads=32, width=4096)), (tokens, tokens)


ZEROGRAPH = [sys.executable, "-m", "zerograph"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        planned("gpt", PLAN, plan)
        screen = on_a_terminal([*ZEROGRAPH, "show", "plan.json"], Path(folder))
        (HERE / "show.svg").write_text(as_svg(screen, "zerograph show plan.json"))
        drawn(plan, "timeline.svg")
        for picture, options in {"untiled.svg": UNTILED, "tiles.svg": TILED}.items():
            planned("wide", options, plan)
            drawn(plan, picture)
    for picture in sorted(HERE.glob("*.svg")):
        text = picture.read_text()
        if len(text) > LARGEST or str(ROOT) in text:
            sys.exit(f"error: {picture} has {len(text)} bytes, or names a folder of this machine")
        print(f"{picture.relative_to(ROOT)}: {len(text)} bytes")


def planned(model: str, options: list[str], plan: Path) -> None:
    subprocess.run([*ZEROGRAPH, "plan", f"docs/pictures/make.py:{model}", *options, "-o", plan], cwd=ROOT, check=True)


def drawn(plan: Path, picture: str) -> None:
    command = [*ZEROGRAPH, "show", plan, "--svg", HERE / picture]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)


def on_a_terminal(command: list[str], folder: Path) -> str:
    """What ``command`` writes to a terminal of COLUMNS by ROWS, colours included."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, cwd=folder, env=environment)
    os.close(theirs)
    written = bytearray()
    while chunk := _read(ours):
        written += chunk
    os.close(ours)
    if process.wait():
        sys.exit(f"error: {' '.join(command)} failed")
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the other side was closed
        return b""


def as_svg(screen: str, title: str) -> str:
    """``screen`` as a terminal window, in whatever monospaced font the reader has."""
    console = Console(record=True, width=COLUMNS + 2, file=open(os.devnull, "w"), highlight=False)  # noqa: SIM115
    console.print(Text.from_ansi(screen))
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=without_fonts, unique_id="screen")


if __name__ == "__main__":
    main()
