"""Amounts and times in explanations read as a person would say them."""

from __future__ import annotations

import pytest

from shoal.scheduler.explain import text
from shoal.scheduler.facts.amounts import Need, demand_of
from tests.support.clusters import NOW, request, within_label

HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "1 s"),
        (0.2, "1 s"),
        (1.2, "2 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (121.0, "3 min"),
        (2 * HOUR - 60, "119 min"),
        (2 * HOUR, "2 h"),
        (47 * HOUR, "47 h"),
        (2 * DAY, "2 days"),
        (2 * DAY + 1, "3 days"),
    ],
)
def test_duration_is_rounded_up_to_the_next_unit_that_people_use(seconds: float, expected: str) -> None:
    assert text.duration(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5.0, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (3599.0, "59 min"),
        (HOUR, "1 h"),
        (DAY - 1, "23 h"),
        (DAY, "1 d"),
        (2.5 * DAY, "2 d"),
    ],
)
def test_age_is_rounded_down(seconds: float, expected: str) -> None:
    assert text.age(seconds) == expected


@pytest.mark.parametrize(
    ("later_s", "expected"),
    [
        (0.0, "08:00 UTC"),
        (1.0, "08:01 UTC"),
        (60.0, "08:01 UTC"),
        (DAY - 60, "07:59 UTC"),
        (DAY, "08:00 UTC on 16 Jan"),
        (400 * DAY, None),
        (-400 * DAY, None),
        (366 * DAY, None),
    ],
)
def test_promised_time_is_rounded_up_and_has_a_date_only_if_it_needs_one(
    later_s: float, expected: str | None
) -> None:
    assert text.clock_time(NOW + later_s, NOW) == expected


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (32 * 10**9, "32 GB"),
        (32 << 30, "32 GiB"),
        (9999 << 20, "9999 MiB"),
        (1536 << 20, "1536 MiB"),
        ((1 << 30) + 1, "1 GiB"),
        ((3 << 29) + 1, "1.5 GiB"),
        (1 << 40, "1 TiB"),
    ],
)
def test_memory_reads_as_it_was_typed(num_bytes: int, expected: str) -> None:
    assert text.bytes_text(num_bytes) == expected


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        (["n1"], "n1"),
        (["n1", "n2"], "n1 and n2"),
        (["n1", "n2", "n3"], "n1, n2 and n3"),
        (["n1", "n2", "n3", "n4"], "n1, n2, n3 and n4"),
        (["n1", "n2", "n3", "n4", "n5"], "n1, n2, n3, n4 and 1 more"),
    ],
)
def test_of_many_names_the_first_four_are_listed(items: list[str], expected: str) -> None:
    assert text.listed(items) == expected


def test_no_name_is_an_empty_text() -> None:
    assert text.joined([]) == ""


@pytest.mark.parametrize(("count", "expected"), [(0, "none is free"), (1, "1 is free"), (2, "2 are free")])
def test_number_of_free_nodes_is_a_sentence(count: int, expected: str) -> None:
    assert text.availability_text(count, "free") == expected


def test_gang_without_a_fixed_size_needs_at_least_its_minimum() -> None:
    assert text.node_count_text(demand_of(request(nodes=2))) == "2 nodes"
    assert text.node_count_text(demand_of(request(nodes=(2, 4)))) == "at least 2 nodes"
    assert text.node_count_text(demand_of(request(nodes=(1, 4)))) == "at least 1 node"


def test_only_required_closeness_is_a_need() -> None:
    assert text.topology_text(demand_of(request(nodes=2, topology=within_label("rack")))) == " in one `rack`"
    assert (
        text.topology_text(demand_of(request(nodes=2, topology=within_label("rack", required=False)))) == ""
    )


@pytest.mark.parametrize(
    ("need", "names", "expected"),
    [
        (Need(1000, None, 0, 0, None), ("cpus", "memory"), "1 CPU and memory in proportion to its CPUs"),
        (
            Need(1500, None, 0, 2, "H100"),
            ("gpus", "memory"),
            "2 H100 GPUs and memory in proportion to its GPUs",
        ),
        (Need(1500, 2 << 30, 0, 0, None), ("cpus", "memory"), "1.5 CPUs and 2 GiB of memory"),
        (Need(0, 0, 0, 1, None, 500), ("gpus",), "0.5 of a GPU"),
        (Need(0, 0, 0, 1, None), ("gpus",), "1 GPU"),
        (Need(0, 0, 10**9, 0, None, labels=(("zone", "a"),)), ("disk",), "1 GB of disk and `zone: a`"),
        (Need(1000, 0, 0, 0, None, is_exclusive=True), ("alone",), "no other job on it"),
    ],
)
def test_need_is_stated_in_the_amounts_that_matter(need: Need, names: tuple[str, ...], expected: str) -> None:
    assert text.need_text(need, names) == expected
