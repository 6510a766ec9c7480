"""Numbers, amounts, names and times as explanations say them. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import ceil

from shoal.scheduler.amounts import MILLI, Demand, Need

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
TYPED_UNITS = (
    ("TiB", 1 << 40),
    ("TB", 10**12),
    ("GiB", 1 << 30),
    ("GB", 10**9),
    ("MiB", 1 << 20),
    ("MB", 10**6),
)
DAY_S = 86_400.0
LONGEST_S = 366 * DAY_S
"""Further ahead than this nobody plans by the clock."""


def number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def are(count: int, state: str) -> str:
    """`none is free`, `1 is free`, `3 are free`."""
    return f"none is {state}" if count == 0 else f"{count} {'is' if count == 1 else 'are'} {state}"


def joined(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def listed(items: Sequence[str], most: int = 4) -> str:
    """All of a few; of many, the first and how many more."""
    if len(items) <= most:
        return joined(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def quoted(items: Iterable[str]) -> list[str]:
    return [f"`{item}`" for item in items]


def size(num_bytes: int) -> str:
    """As it was typed, `32 GB` or `32 GiB`; else in the largest unit that leaves at least 1."""
    for unit, scale in TYPED_UNITS:
        if num_bytes % scale == 0 and 0 < num_bytes // scale < 10_000:
            return f"{num_bytes // scale} {unit}"
    for unit, scale in UNITS:
        if num_bytes >= scale:
            return f"{_decimals(num_bytes / scale)} {unit}"
    return number_of(num_bytes, "byte")


def thousandths(amount: int) -> str:
    """Of CPUs or GPUs, as a number of them."""
    return _decimals(amount / MILLI, places=3)


def duration(seconds: float) -> str:
    """Rounded up to what a person would say."""
    if seconds < 120:
        return f"{max(ceil(seconds), 1)} s"
    if seconds < 7200:
        return f"{ceil(seconds / 60)} min"
    return f"{ceil(seconds / 3600)} h" if seconds < 2 * DAY_S else f"{ceil(seconds / DAY_S)} days"


def age(seconds: float) -> str:
    """A duration that has passed, as people say it: never more than it was."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_s:
            return f"{int(seconds // size_s)} {unit}"
    return f"{max(int(seconds), 0)} s"


def clock_time(at: float, now: float) -> str | None:
    """The time of day, with the date when it is not within a day; None when it is too far to say."""
    if not now - LONGEST_S < at < now + LONGEST_S:
        return None
    # To the minute, upwards: an early promise is worse than a late one.
    told = datetime.fromtimestamp(ceil(at / 60) * 60, UTC)
    return f"{told:%H:%M} UTC" if at - now < DAY_S else f"{told:%H:%M} UTC on {told.day} {told:%b}"


def num_nodes(demand: Demand) -> str:
    least = number_of(demand.min_nodes, "node")
    return least if demand.min_nodes == demand.max_nodes else f"at least {least}"


def together(demand: Demand) -> str:
    """How close or apart its nodes must be: ` in one `rack``, or nothing."""
    within = f" in one `{demand.within}`" if demand.is_close_required else ""
    return f"{within}, each in another `{demand.spread}`" if demand.spread else within


def amounts(need: Need, what: Iterable[str], *, free: bool = False) -> str:
    """The named amounts of a need: `8 free H100 GPUs and 64 GiB of free memory`."""
    mark = "free " if free else ""
    kind = f"{need.gpu_kind} " if need.gpu_kind else ""
    told = {
        "gpus": gpus(need, f"{mark}{kind}"),
        "cpus": f"{thousandths(need.millicpus)} {mark}CPU{'' if need.millicpus == MILLI else 's'}",
        "memory": f"{mark}memory in proportion to its {'GPUs' if need.num_gpus else 'CPUs'}"
        if need.memory_bytes is None
        else f"{size(need.memory_bytes)} of {mark}memory",
        "disk": f"{size(need.disk_bytes)} of {mark}disk",
        "alone": "no other job on it",
    }
    return joined([*(told[name] for name in what), *(f"`{name}: {value}`" for name, value in need.labels)])


def gpus(need: Need, such: str) -> str:
    """`8 H100 GPUs`, `0.5 of a free GPU`."""
    if need.gpu_milli < MILLI:
        return f"{_decimals(need.gpu_milli / MILLI)} of a {such}GPU"
    return number_of(need.num_gpus, f"{such}GPU")


def _decimals(value: float, places: int = 2) -> str:
    return f"{value:.{places}f}".rstrip("0").rstrip(".")
