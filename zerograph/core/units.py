"""Sizes and times for people: ``parse_bytes("32MiB")``, ``format_bytes(33554432)`` and ``format_seconds(0.015)``."""

from __future__ import annotations

import re
from fractions import Fraction
from types import UnionType

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int) -> int:
    """Bytes in ``text``: an int, or a number with a unit such as ``"32MiB"`` or ``"1.5 GB"``.

    A text needs its unit: whoever types 70 does not mean 70 bytes.

    Raises:
        ValueError: the text is no size or has no unit, is negative, or is 2**63 and more.
    """
    if isinstance(text, int):
        size = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
        if match is not None and not match[2]:
            raise ValueError(f"{text!r} has no unit: '{match[1]}GiB', '{match[1]}GB', or '{match[1]}B' for bytes?")
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                f"{text!r} is not a size such as '32MiB' or '1.5GB'; units are {', '.join(_UNITS).replace('IB', 'iB')}"
            )
        # Exact: as a float, "9007199254740993B" would be another number.
        size = int(Fraction(match[1]) * _UNITS[match[2].upper()])
    if size < 0:
        raise ValueError(f"a size cannot be negative, got {text!r}")
    if size >= 2**63:
        raise ValueError(f"{str(text)[:40]} is more than 8 EiB, which no machine addresses")
    return size


def format_bytes(size: float) -> str:
    """``size`` bytes with a binary unit and three significant digits: ``"32 MiB"``, ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{_digits(size)} {unit}"
        size /= 1024
    return f"{_digits(size)} TiB"


def format_seconds(seconds: float) -> str:
    """``seconds`` with three significant digits: ``"1.52 s"``, ``"15 ms"``, ``"20 us"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        # From here on three digits round up to 1 of this unit.
        if abs(seconds) >= scale * 0.9995:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us" if seconds else "0 s"


def counted(number: int, what: str) -> str:
    """So many of ``what``: ``"1 rank"``, ``"4 ranks"``."""
    return f"{number} {what}" + "s" * (number != 1)


def format_ranks(size: int, replicas: int = 1) -> str:
    """Ranks that split a model: ``"1 rank"``, ``"4 ranks"``, and ``"4 ranks in each of 2 replicas"``."""
    ranks = counted(size, "rank")
    return ranks if replicas == 1 else f"{ranks} in each of {replicas} replicas"


def _digits(number: float) -> str:
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def is_number(value: object, kind: type | UnionType = int | float) -> bool:
    """Whether ``value``, of a file that anyone may have edited, is a number; true, false, NaN and infinity are none."""
    return isinstance(value, kind) and not isinstance(value, bool) and -1e300 < value < 1e300  # type: ignore[operator]
