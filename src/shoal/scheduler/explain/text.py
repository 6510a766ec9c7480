"""Format numbers, amounts, names and times for explanations. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import ceil

from shoal.scheduler.facts.amounts import MILLI, Demand, Need

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
"""No person plans by the clock further ahead than this."""


def number_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def availability_text(count: int, state: str) -> str:
    """`none is free`, `1 is free`, `3 are free`."""
    return f"none is {state}" if count == 0 else f"{count} {'is' if count == 1 else 'are'} {state}"


def joined(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def listed(items: Sequence[str], most: int = 4) -> str:
    """Return all of a few items; of many, the first ones and how many more."""
    if len(items) <= most:
        return joined(items)
    return f"{', '.join(items[:most])} and {len(items) - most} more"


def quoted(items: Iterable[str]) -> list[str]:
    return [f"`{item}`" for item in items]


def bytes_text(num_bytes: int) -> str:
    """Format as it was typed, `32 GB` or `32 GiB`; otherwise in the largest unit that leaves at least 1."""
    for unit, scale in TYPED_UNITS:
        if num_bytes % scale == 0 and 0 < num_bytes // scale < 10_000:
            return f"{num_bytes // scale} {unit}"
    for unit, scale in UNITS:
        if num_bytes >= scale:
            return f"{_decimals(num_bytes / scale)} {unit}"
    return number_of(num_bytes, "byte")


def thousandths(amount: int) -> str:
    """Format thousandths of CPUs or GPUs as a number of them."""
    return _decimals(amount / MILLI, places=3)


def duration(seconds: float) -> str:
    """Round up to what a person would say."""
    if seconds < 120:
        return f"{max(ceil(seconds), 1)} s"
    if seconds < 7200:
        return f"{ceil(seconds / 60)} min"
    return f"{ceil(seconds / 3600)} h" if seconds < 2 * DAY_S else f"{ceil(seconds / DAY_S)} days"


def age(seconds: float) -> str:
    """Format a duration that has passed, rounded down, as people say it."""
    for size_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size_s:
            return f"{int(seconds // size_s)} {unit}"
    return f"{max(int(seconds), 0)} s"


def clock_time(at: float, now: float) -> str | None:
    """Return the time of day, with the date if it is more than a day away; None if it is too far away to
    state.
    """
    if not now - LONGEST_S < at < now + LONGEST_S:
        return None
    # Round up to the minute: an early promise is worse than a late one.
    time = datetime.fromtimestamp(ceil(at / 60) * 60, UTC)
    return f"{time:%H:%M} UTC" if at - now < DAY_S else f"{time:%H:%M} UTC on {time.day} {time:%b}"


def node_count_text(demand: Demand) -> str:
    least = number_of(demand.min_nodes, "node")
    return least if demand.min_nodes == demand.max_nodes else f"at least {least}"


def topology_text(demand: Demand) -> str:
    """Say how close or apart its nodes must be: ` in one `rack``, or nothing."""
    within = f" in one `{demand.within}`" if demand.is_close_required else ""
    return f"{within}, each in another `{demand.spread}`" if demand.spread else within


def need_text(need: Need, names: Iterable[str], *, free: bool = False) -> str:
    """Format the named amounts of a need: `8 free H100 GPUs and 64 GiB of free memory`."""
    mark = "free " if free else ""
    kind = f"{need.gpu_kind} " if need.gpu_kind else ""
    text_by_name = {
        "gpus": gpu_text(need, f"{mark}{kind}"),
        "cpus": f"{thousandths(need.millicpus)} {mark}CPU{'' if need.millicpus == MILLI else 's'}",
        "memory": f"{mark}memory in proportion to its {'GPUs' if need.num_gpus else 'CPUs'}"
        if need.memory_bytes is None
        else f"{bytes_text(need.memory_bytes)} of {mark}memory",
        "disk": f"{bytes_text(need.disk_bytes)} of {mark}disk",
        "alone": "no other job on it",
    }
    return joined(
        [*(text_by_name[name] for name in names), *(f"`{name}: {value}`" for name, value in need.labels)]
    )


def gpu_text(need: Need, qualifier: str) -> str:
    """`8 H100 GPUs`, `0.5 of a free GPU`."""
    if need.gpu_milli < MILLI:
        return f"{_decimals(need.gpu_milli / MILLI)} of a {qualifier}GPU"
    return number_of(need.num_gpus, f"{qualifier}GPU")


def _decimals(value: float, places: int = 2) -> str:
    return f"{value:.{places}f}".rstrip("0").rstrip(".")
