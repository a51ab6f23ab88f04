"""Sizes for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerograph.core.units import format_bytes, format_seconds, is_number, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0B", 0),
        ("33554432B", 2**25),
        ("1.1 TB", 1_100_000_000_000),
        ("32MiB", 2**25),
        (" 32 mib ", 2**25),
        ("1.5GB", 1_500_000_000),
        ("2 TiB", 2**41),
        ("7B", 7),
        ("1KB", 1000),
        ("0.5KiB", 512),
        (12, 12),
    ],
)
def test_parse(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["0", "70", " 33554432 ", "1.5"])
def test_a_number_without_a_unit_is_asked_for_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"has no unit: '.*GiB', '.*GB', or '.*B' for bytes\?"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["9" * 30 + "TiB", "1" * 400 + "B", 2**63])
def test_what_no_machine_addresses_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match="more than 8 EiB"):
        parse_bytes(text)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -math.inf, "1", None])
def test_what_is_no_number_of_a_file(value: object) -> None:
    assert not is_number(value)


def test_large_whole_numbers_are_no_numbers_of_a_file_either() -> None:
    assert is_number(10**18) and not is_number(10**400)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e6", "32 MiBs", "1,5GB", "1.GB", "0x10", -1])
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (2**25, "32 MiB"),
        (1.5 * 2**30, "1.5 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_format(size: float, text: str) -> None:
    assert format_bytes(size) == text


@given(size=st.integers(0, 2**60))
def test_what_is_formatted_can_be_parsed_and_is_close(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2e-7, "0.2 us"),
        (5e-6, "5 us"),
        (0.0009994, "999 us"),
        (0.00099951, "1 ms"),
        (0.0153, "15.3 ms"),
        (0.9999, "1 s"),
        (1.521, "1.52 s"),
        (4321.0, "4321 s"),
        (-0.002, "-2 ms"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
