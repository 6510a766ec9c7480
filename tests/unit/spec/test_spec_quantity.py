"""Amounts: which texts are read, and the message for each refused text."""

from __future__ import annotations

import math

import pytest

from shoal.spec.quantity import (
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_number,
    parse_seconds,
    parse_whole,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("32GB", 32 * 10**9),
        ("32 GB", 32 * 10**9),
        ("32gb", 32 * 10**9),
        ("512MiB", 512 << 20),
        ("1.5GiB", 3 << 29),
        ("0.1KiB", 103),
        ("2TB", 2 * 10**12),
        ("17", 17),
        (17, 17),
        (17.2, 18),
    ],
)
def test_bytes_are_read_exactly_and_rounded_up(written: object, expected: int) -> None:
    assert parse_bytes(written) == expected


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("32G", "`32GB` (of 1000) or `32GiB` (of 1024)"),
        ("32Gi", "`32GB` (of 1000) or `32GiB` (of 1024)"),
        ("32 parsecs", "unknown unit `parsecs`"),
        ("-5GB", "not an amount"),
        ("GB", "not an amount"),
        ("", "not an amount"),
        ("9" * 65 + "GB", "not an amount"),
        (math.nan, "`nan` is not a number"),
        (math.inf, "`inf` is not a number"),
        pytest.param(10**5000, "a number of 5001 digits is not a number", id="5001 digits"),
        (True, "`true` is not an amount"),
        (None, "`null` is not an amount"),
        ([1], "a list is not an amount"),
    ],
)
def test_amounts_that_cannot_be_read_say_why(written: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_bytes(written)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("2d", 172800.0),
        ("1w", 604800.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("12:00:01", 43201.0),
        ("100:00:00", 360000.0),
    ],
)
def test_times_are_read_as_seconds(written: object, expected: float) -> None:
    assert parse_seconds(written) == expected


@pytest.mark.parametrize(
    "written", ["soon", "1:30", "1h1h", "1h30", "-5s", "5 minutes", "1:60:00", "", True, math.inf, "s"]
)
def test_times_with_two_readings_or_none_are_refused(written: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(written)


@pytest.mark.parametrize("written", ["2.5", "-1", "1e3", "٣", "0x10", "1_000", 2.0, True, None, "9" * 19])
def test_whole_numbers_are_not_guessed(written: object) -> None:
    with pytest.raises(ValueError):
        parse_whole(written)


def test_minus_zero_seconds_is_written_as_zero() -> None:
    assert str(parse_seconds(-0.0)) == "0.0"


def test_numbers_may_have_a_fraction() -> None:
    assert parse_number("0.5") == 0.5
    with pytest.raises(ValueError):
        parse_number("half")


def test_amounts_are_formatted_in_the_largest_exact_unit() -> None:
    assert [format_bytes(n) for n in (1 << 20, 32 * 10**9, 1023)] == ["1MiB", "32GB", "1023B"]
    assert [format_seconds(n) for n in (3600, 90, 0.5, 86400 * 3)] == ["1h", "90s", "0.5s", "3d"]
