"""Two reports beside each other, as rows of text: before, after, and the change."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shoal.sim.fairness import Fairness
from shoal.sim.report import SimulationReport, WaitStatistics

Row = tuple[str, str, str, str]
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60
FAIR_TO_USERS = "unfairness to users"
MOST_USERS = 5
LEAST_TOLD = 0.001
"""Part of the entitlement. A table shows no smaller shortfall."""


class _Line(NamedTuple):
    name: str
    value: Callable[[SimulationReport], float]
    show: Callable[[float], str]
    is_ratio: bool = True
    """Whether the change is shown in percent of the value before; else as a difference."""


def seconds(value: float) -> str:
    """`0s`, `41s`, `7.5m`, `3.2h`, `12.0d`: a simulation is not good for more than three figures."""
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
    _Line("jobs run", lambda report: report.overall.num_jobs, _count),
    _Line("jobs refused", lambda report: report.num_refused, _count),
    _Line("wait, mean", lambda report: report.overall.wait_s.mean, seconds),
    _Line("wait, p50", lambda report: report.overall.wait_s.p50, seconds),
    _Line("wait, p95", lambda report: report.overall.wait_s.p95, seconds),
    _Line("wait, p99.9", lambda report: report.overall.wait_s.p99_9, seconds),
    _Line("wait, max", lambda report: report.overall.wait_s.max, seconds),
    _Line("bounded slowdown, mean", lambda report: report.overall.slowdown.mean, _plain),
    _Line("bounded slowdown, p99.9", lambda report: report.overall.slowdown.p99_9, _plain),
    _Line("completion, mean", lambda report: report.overall.completion_s.mean, seconds),
    _Line("completion, p95", lambda report: report.overall.completion_s.p95, seconds),
    _Line("utilisation", lambda report: report.utilisation, _share, is_ratio=False),
    _Line("goodput", lambda report: report.goodput, _share, is_ratio=False),
    _Line("lost work, device-hours", lambda report: report.lost_hours, _plain),
    _Line("node failures", lambda report: report.num_failures, _count),
    _Line("jobs cut short", lambda report: report.num_interrupted, _count),
    _Line(FAIR_TO_USERS, lambda report: report.user_fairness.error, _share, is_ratio=False),
    _Line("unfairness to projects", lambda report: report.project_fairness.error, _share, is_ratio=False),
)


def overall_rows(before: SimulationReport, after: SimulationReport) -> list[Row]:
    """A row for each measure. Measures without a value on either side are left out."""
    return [_row(line, before, after) for line in LINES if _has_value(line, before, after)]


def single_rows(only: SimulationReport) -> list[tuple[str, str]]:
    """The same rows for one report."""
    return [(row[0], row[1]) for row in overall_rows(only, only)]


def project_rows(before: SimulationReport, after: SimulationReport) -> list[tuple[str, ...]]:
    """For each project its jobs; mean and 95th percentile of the wait: before, after, change; then the part
    of its entitlement that it missed, before and after.
    """
    rows = []
    for name in sorted(before.projects.keys() | after.projects.keys()):
        old, new = before.projects.get(name), after.projects.get(name)
        waits = [
            (_waits(old, "mean"), _waits(new, "mean")),
            (_waits(old, "p95"), _waits(new, "p95")),
        ]
        cells = [text for pair in waits for text in (*map(_seconds_or_none, pair), _change(*pair))]
        jobs = next(row.num_jobs for row in (new, old) if row)
        missed = [_missed(report.project_fairness, name) for report in (before, after)]
        rows.append((name, _count(jobs), *cells, *map(_share, missed)))
    return rows


def user_rows(before: SimulationReport, after: SimulationReport) -> list[tuple[str, str, str, str]]:
    """The users who missed most of their entitlement, before or after: the parts, and the change.

    Empty if the trace has no users.
    """
    names = before.user_fairness.parts.keys() | after.user_fairness.parts.keys()
    if not _has_users(before):
        return []
    pairs = {name: [_missed(report.user_fairness, name) for report in (before, after)] for name in names}
    worst = sorted(
        (name for name in names if max(pairs[name]) >= LEAST_TOLD), key=lambda n: (-max(pairs[n]), n)
    )
    return [
        (name, _share(was), _share(would), _points(was, would))
        for name in worst[:MOST_USERS]
        for was, would in [pairs[name]]
    ]


def _has_users(report: SimulationReport) -> bool:
    """Whether the trace has users. If not, projects stand for them."""
    return not report.user_fairness.parts.keys() <= report.project_fairness.parts.keys()


def _missed(fairness: Fairness, name: str) -> float:
    part = fairness.parts.get(name)
    return part.error if part else 0.0


def _waits(waits: WaitStatistics | None, field: str) -> float | None:
    return None if waits is None else float(getattr(waits.wait_s, field))


def _seconds_or_none(value: float | None) -> str:
    return "-" if value is None else seconds(value)


def _has_value(line: _Line, before: SimulationReport, after: SimulationReport) -> bool:
    if line.name == FAIR_TO_USERS and not _has_users(before):
        return False
    is_always_told = line.name.startswith(("jobs run", "wait", "utilisation", "goodput"))
    return is_always_told or bool(line.value(before)) or bool(line.value(after))


def _row(line: _Line, before: SimulationReport, after: SimulationReport) -> Row:
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
