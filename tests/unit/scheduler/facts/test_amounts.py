"""Exact amounts, and the words for them."""

from __future__ import annotations

import pytest

from shoal.scheduler.explain.text import bytes_text, clock_time, duration, listed, thousandths
from shoal.scheduler.facts.amounts import millicpus_available, millicpus_needed
from tests.support.clusters import NOW


@pytest.mark.parametrize("cpus", [0.1, 0.29, 0.57, 1.1, 2.3, 4.35, 64.0, 99_999.999])
def test_a_decimal_with_three_places_is_the_same_as_need_and_as_capacity(cpus: float) -> None:
    assert millicpus_needed(cpus) == millicpus_available(cpus) == int(str(round(cpus * 1000)))


def test_finer_fractions_round_needs_up_and_capacity_down() -> None:
    assert millicpus_needed(0.0004) == 1
    assert millicpus_available(1.9999) == 1999


@pytest.mark.parametrize(
    "text, expected",
    [
        (bytes_text(1), "1 byte"),
        (bytes_text((1536 << 20) + 1), "1.5 GiB"),
        (bytes_text(1536 << 20), "1536 MiB"),
        (bytes_text(32 * 10**9), "32 GB"),
        (bytes_text(32_012 << 20), "31.26 GiB"),
        (bytes_text(64 << 30), "64 GiB"),
        (thousandths(500), "0.5"),
        (thousandths(100_000), "100"),
        (duration(0.2), "1 s"),
        (duration(119.5), "120 s"),
        (duration(130), "3 min"),
        (duration(7200), "2 h"),
        (duration(10 * 86_400), "10 days"),
        (listed(["a"]), "a"),
        (listed(["a", "b", "c"]), "a, b and c"),
        (listed(list("abcdef")), "a, b, c, d and 2 more"),
        (clock_time(NOW + 1, NOW), "08:01 UTC"),
        (clock_time(NOW + 86_400 * 2, NOW), "08:00 UTC on 17 Jan"),
        (clock_time(1e300, NOW), None),
    ],
)
def test_amounts_read_as_people_say_them(text: str | None, expected: str | None) -> None:
    assert text == expected
