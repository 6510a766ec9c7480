"""Two reports beside each other, as rows of text: what there was, what there would be, and the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.sim.fairness import Fairness
from shoal.sim.report import Report, Waits

Row = tuple[str, str, str, str]
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60
FAIR_TO_USERS = "unfairness to users"
MOST_USERS = 5
LEAST_TOLD = 0.001
"""Of its part: less is nothing in a table."""


class _Line(NamedTuple):
    name: str
    value: Callable[[Report], float]
    show: Callable[[float], str]
    is_ratio: bool = True
    """Whether the change is told in percent of what there was; else as a difference."""


def seconds(value: float) -> str:
    """`0s`, `41s`, `7.5m`, `3.2h`, `12.0d`: three figures are all a simulation is good for."""
    for size, unit in ((DAY_S, "d"), (HOUR_S, "h"), (MINUTE_S, "m")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}s"


def _plain(value: float) -> str:
    return f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


LINES = (
    _Line("jobs run", lambda one: one.overall.num_jobs, _count),
    _Line("jobs refused", lambda one: one.num_refused, _count),
    _Line("wait, mean", lambda one: one.overall.wait_s.mean, seconds),
    _Line("wait, p50", lambda one: one.overall.wait_s.p50, seconds),
    _Line("wait, p95", lambda one: one.overall.wait_s.p95, seconds),
    _Line("wait, p99.9", lambda one: one.overall.wait_s.p99_9, seconds),
    _Line("wait, max", lambda one: one.overall.wait_s.max, seconds),
    _Line("bounded slowdown, mean", lambda one: one.overall.slowdown.mean, _plain),
    _Line("bounded slowdown, p99.9", lambda one: one.overall.slowdown.p99_9, _plain),
    _Line("completion, mean", lambda one: one.overall.completion_s.mean, seconds),
    _Line("completion, p95", lambda one: one.overall.completion_s.p95, seconds),
    _Line("utilisation", lambda one: one.utilisation, _share, is_ratio=False),
    _Line("goodput", lambda one: one.goodput, _share, is_ratio=False),
    _Line("lost work, device-hours", lambda one: one.lost_hours, _plain),
    _Line("node failures", lambda one: one.num_failures, _count),
    _Line("jobs cut short", lambda one: one.num_interrupted, _count),
    _Line(FAIR_TO_USERS, lambda one: one.user_fairness.error, _share, is_ratio=False),
    _Line("unfairness to projects", lambda one: one.project_fairness.error, _share, is_ratio=False),
)


def overall_rows(before: Report, after: Report) -> list[Row]:
    """A line for each measure; those that say nothing on either side are left out."""
    return [_row(line, before, after) for line in LINES if _says_something(line, before, after)]


def single_rows(only: Report) -> list[tuple[str, str]]:
    """The same of one report."""
    return [(row[0], row[1]) for row in overall_rows(only, only)]


def project_rows(before: Report, after: Report) -> list[tuple[str, ...]]:
    """For each project its jobs; mean and 95th percentile of the wait: before, after, change; then what it
    missed of its part, before and after.
    """
    rows = []
    for name in sorted(before.projects.keys() | after.projects.keys()):
        one, other = before.projects.get(name), after.projects.get(name)
        waits = [
            (_waits(one, "mean"), _waits(other, "mean")),
            (_waits(one, "p95"), _waits(other, "p95")),
        ]
        cells = [text for pair in waits for text in (*map(_seconds_or_none, pair), _change(*pair))]
        jobs = next(found.num_jobs for found in (other, one) if found)
        missed = [_missed(one.project_fairness, name) for one in (before, after)]
        rows.append((name, _count(jobs), *cells, *map(_share, missed)))
    return rows


def user_rows(before: Report, after: Report) -> list[tuple[str, str, str, str]]:
    """The users who missed most of their parts, before or after: how much, and the change.

    None where no users are known.
    """
    names = before.user_fairness.parts.keys() | after.user_fairness.parts.keys()
    if not _has_users(before):
        return []
    pairs = {name: [_missed(one.user_fairness, name) for one in (before, after)] for name in names}
    worst = sorted(
        (name for name in names if max(pairs[name]) >= LEAST_TOLD), key=lambda n: (-max(pairs[n]), n)
    )
    return [
        (name, _share(was), _share(would), _points(was, would))
        for name in worst[:MOST_USERS]
        for was, would in [pairs[name]]
    ]


def _has_users(told: Report) -> bool:
    """Whether users are known; else projects stand for them."""
    return not told.user_fairness.parts.keys() <= told.project_fairness.parts.keys()


def _missed(fairness: Fairness, name: str) -> float:
    part = fairness.parts.get(name)
    return part.error if part else 0.0


def _waits(found: Waits | None, field: str) -> float | None:
    return None if found is None else float(getattr(found.wait_s, field))


def _seconds_or_none(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _says_something(line: _Line, before: Report, after: Report) -> bool:
    if line.name == FAIR_TO_USERS and not _has_users(before):
        return False
    is_always_told = line.name.startswith(("jobs run", "wait", "utilisation", "goodput"))
    return is_always_told or bool(line.value(before)) or bool(line.value(after))


def _row(line: _Line, before: Report, after: Report) -> Row:
    was, would = line.value(before), line.value(after)
    if line.is_ratio:
        return line.name, line.show(was), line.show(would), _change(was, would)
    return line.name, line.show(was), line.show(would), _points(was, would)


def _points(was: float, would: float) -> str:
    points = 100 * (would - was)
    return f"{points:+.1f} pt" if round(points, 1) else "="


def _change(was: float | None, would: float | None) -> str:
    if was is None or would is None:
        return "-"
    if was == would:
        return "="
    if not was:
        return "new"
    ratio = would / was - 1
    return f"{ratio:+.0%}" if abs(ratio) >= 0.01 else f"{ratio:+.1%}"
