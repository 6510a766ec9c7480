"""Ranges, GPUs and their bounds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal.errors import SpecError
from shoal.spec import ByteRange, CpuRange, GpuSpec, NodeRange, Resources, parse_job


def resources(**fields: Any) -> Resources:
    return parse_job({"run": "true", "resources": fields}).resources


def refusal(**fields: Any) -> str:
    with pytest.raises(SpecError) as refused:
        resources(**fields)
    assert len(refused.value.problems) == 1, refused.value.problems
    return refused.value.problems[0]


@pytest.mark.parametrize(
    ("written", "low", "high"), [(2, 2, 2), ("2", 2, 2), ("2..4", 2, 4), ({"min": 1, "max": 9}, 1, 9)]
)
def test_nodes_are_a_number_or_a_closed_range(written: object, low: int, high: int) -> None:
    assert resources(nodes=written).nodes == NodeRange(min=low, max=high)


@pytest.mark.parametrize(
    ("written", "low", "high"),
    [(4, 4, 4), (0.5, 0.5, 0.5), ("4+", 4, None), ("4..", 4, None), ("4..8", 4, 8), ("0.5..1.5", 0.5, 1.5)],
)
def test_cpus_may_be_open_and_have_fractions(written: object, low: float, high: float | None) -> None:
    assert resources(cpus=written).cpus == CpuRange(min=low, max=high)


def test_memory_ranges_take_units_on_either_end_and_in_mappings() -> None:
    assert resources(memory="1GB..1GiB").memory == ByteRange(min=10**9, max=1 << 30)
    assert resources(memory="32GB+").memory == ByteRange(min=32 * 10**9)
    assert resources(disk={"min": "32GB"}).disk == ByteRange(min=32 * 10**9)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("H100:8", GpuSpec(kind="H100", count=8)),
        ("A100-80GB:2", GpuSpec(kind="A100-80GB", count=2)),
        ("H100", GpuSpec(kind="H100", count=1)),
        ("8", GpuSpec(count=8)),
        (8, GpuSpec(count=8)),
        (0, None),
        ("0", None),
        ({"kind": "H100", "count": 2}, GpuSpec(kind="H100", count=2)),
        (0.5, GpuSpec(share=0.5)),
        ("0.29", GpuSpec(share=0.29)),
        ("H100:0.5", GpuSpec(kind="H100", share=0.5)),
        ("H100-1g.10gb:2", GpuSpec(kind="H100-1g.10gb", count=2)),
    ],
)
def test_gpus_have_a_kind_a_count_or_both(written: object, expected: GpuSpec | None) -> None:
    assert resources(gpus=written).gpus == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": "4..2"}, "`resources.nodes` ends at `2`, below its start `4`"),
        ({"nodes": "2+"}, "`2+` has no upper end; write one, such as `2..4`"),
        ({"nodes": "..4"}, "`..4` has no lower end"),
        ({"nodes": 0}, "`0` is below the least, 1"),
        ({"nodes": -1}, "`-1` is below the least, 1"),
        ({"nodes": 100_001}, "`100001` is above the most, 100,000"),
        ({"nodes": 2**63}, "`9223372036854775808` is above the most"),
        ({"nodes": 10**5000}, "a number of 5001 digits is above the most"),
        ({"nodes": 1.5}, "`1.5` is not a whole number"),
        ({"nodes": True}, "`true` is not a range such as `2..4`"),
        ({"nodes": "1..2..3"}, "`2..3` is not a whole number"),
        ({"nodes": {"min": 1}}, "`resources.nodes.max` is missing"),
        (
            {"nodes": {"min": 1, "max": 2, "mx": 3}},
            "unknown key `mx` in `resources.nodes`; did you mean `max`?",
        ),
        ({"cpus": math.nan}, "`nan` is not a number"),
        ({"cpus": 1e308}, "`1e+308` is above the most, 100,000"),
        ({"cpus": "many"}, "`many` is not a number"),
        ({"memory": 32}, "write a unit, such as `32GB`"),
        ({"memory": "32"}, "write a unit, such as `32GB`"),
        ({"memory": "10KB"}, "`10KB` is below the least, 1MiB"),
        ({"memory": "9999PB"}, "`9999PB` is above the most, 1024PiB"),
        ({"memory": {"min": "32"}}, "`resources.memory.min`"),
        ({"gpus": 1025}, "`1025` is above the most, 1,024 on a node"),
        ({"gpus": -1}, "`-1` is below the least"),
        ({"gpus": "H100:0"}, "`H100:0` is below the least, 1 on a node"),
        ({"gpus": "H100:"}, "not GPUs such as `H100:8`"),
        ({"gpus": "8:H100"}, "not GPUs such as `H100:8`"),
        ({"gpus": 2.0}, "`2` is not GPUs: whole ones have no decimals"),
        ({"gpus": 1.5}, "`1.5` is not GPUs: whole ones have no decimals, as in `2`, and a part is below 1"),
        ({"gpus": "H100:1.5"}, "a part is below 1"),
        ({"gpus": 0.0}, "a part is below 1"),
        ({"gpus": math.nan}, "`nan` is not GPUs"),
        ({"gpus": 0.125}, "`0.125` is not in hundredths of a GPU; write `0.25` or `0.5`"),
        ({"gpus": {"count": 2, "share": 0.5}}, "has a `share` of 2 GPUs; only a single GPU can be shared"),
        ({"gpus": "H100-1g.10gb:0.5"}, "has a `share` of `H100-1g.10gb`, a slice, which is only given whole"),
        ({"gpus": "A100|H100-1g.10gb"}, "has `H100-1g.10gb`, a slice, beside whole GPUs"),
        ({"gpus": {"share": 0.001}}, "`0.001` is below the least, 0.01"),
        ({"exclusive": "maybe"}, "`resources.exclusive` must be `true` or `false`, not the text `maybe`"),
        ({"gpus": ""}, "not GPUs"),
    ],
)
def test_what_is_out_of_bounds_is_one_problem_with_the_value_and_the_limit(
    fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(**fields)
