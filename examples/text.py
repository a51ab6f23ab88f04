"""Real text as bytes: the Python standard library's own sources, or the folder named by the variable TEXT."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "encodings"}  # encodings: tables, hardly text
HELD_OUT = 0.05
SMALLEST = 100_000  # bytes
HINT = "hint: set TEXT to a folder of text files, or unset it to train on the Python standard library"


def load() -> tuple[Tensor, Tensor]:
    """All text as two uint8 tensors, (train, held out): the same bytes on every rank and in every run."""
    files = files_of_user() if "TEXT" in os.environ else files_of_python()
    texts = [text for text in map(read_text, files) if text]
    if (size := sum(map(len, texts))) < SMALLEST:
        found = f"{size:,} bytes of UTF-8 text in {len(files):,} files"
        raise SystemExit(f"found {found}, at least {SMALLEST:,} bytes are needed\n\n{HINT}")
    # The end of every file is held out, not the last files: both parts then hold the same kinds of text.
    parts = [(text[:cut], text[cut:]) for text in texts for cut in [round(len(text) * (1 - HELD_OUT))]]
    train, held_out = map(b"".join, zip(*parts, strict=True))
    return as_tensor(train), as_tensor(held_out)


def files_of_python() -> list[Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.rglob("*.py"))
    return [file for file in files if SKIPPED.isdisjoint(file.relative_to(folder).parts)]


def files_of_user() -> list[Path]:
    folder = Path(os.environ["TEXT"]).expanduser()
    if not folder.is_dir():
        raise SystemExit(f"TEXT={os.environ['TEXT']} is not a folder\n\n{HINT}")
    return sorted(file for file in folder.rglob("*") if file.is_file())


def read_text(file: Path) -> bytes:
    """The file's bytes, or nothing when it is unreadable or not UTF-8 text."""
    try:
        text = file.read_bytes()
        text.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in text else text


def as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)  # a bytearray, because tensors are writable


def batches(text: Tensor, count: int, size: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`count` random batches: (size, length) bytes, and the byte that follows each of them."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length + 1)
    for _ in range(count):
        starts = torch.randint(len(text) - length, (size, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
