"""Colours of memory's kinds: text on them can be read, and people with any kind of colour blindness tell them apart."""

from __future__ import annotations

from itertools import combinations
from math import dist
from typing import get_args

import pytest

from zerograph.cli.export.labels import KIND_COLOURS, REST
from zerograph.core.step import KIND_NAMES, Kind

SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
"""What is seen of linear red, green and blue without one kind of cone (Machado, Oliveira, Fernandes, 2009)."""
DISTANCE = 10.0
"""Distance in CIELAB; 2.3 is said to be just noticeable."""


def linear(colour: str) -> tuple[float, ...]:
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (sum(a * b for a, b in zip(row, rgb, strict=True)) for row in rows)
    f = [t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x / 0.9505, y, z / 1.089)]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def test_every_kind_has_a_name_and_a_colour() -> None:
    assert set(KIND_NAMES) == set(get_args(Kind)) == set(KIND_COLOURS) - {REST}


@pytest.mark.parametrize("kind", KIND_COLOURS)
def test_names_on_bands_can_be_read(kind: str) -> None:
    light, dark = sorted((luminance(colour) for colour in KIND_COLOURS[kind]), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("eye", SEEN)
def test_any_two_kinds_are_distinguished(eye: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        rgb = linear(colour)
        return lab(tuple(min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in SEEN[eye]))

    for (one, (a, _)), (other, (b, _)) in combinations(KIND_COLOURS.items(), 2):
        assert dist(seen(a), seen(b)) > DISTANCE, (one, other)
