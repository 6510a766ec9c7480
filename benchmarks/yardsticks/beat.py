"""A row to beat: a published number of another group's policy, and the default policy's beside it.

A row that is missed is reported, with the difference. It does not make the yardsticks fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import table
from benchmarks.yardsticks.section import Report


@dataclass(frozen=True)
class Beat:
    case: str
    measure: str
    rival: str
    """The authors of the number."""
    bound: float
    ours: float
    is_goal: bool = True
    """False: shown for comparison, a bound that no policy without an oracle need reach."""

    @property
    def is_met(self) -> bool:
        return self.ours <= self.bound

    @property
    def verdict(self) -> str:
        by = f"{abs(self.ours / self.bound - 1):.1%}"
        if not self.is_goal:
            return f"{self.ours / self.bound:.2f}x (no goal)"
        return f"met, {by} below" if self.is_met else f"missed by {by}"


def shown(value: float) -> str:
    return f"{value:,.2f}" if value < 10_000 else f"{value:,.0f}"


def report(title: str, rows: Sequence[Beat], notes: Sequence[str] = ()) -> Report:
    cells = [
        [row.case, row.measure, row.rival, shown(row.bound), shown(row.ours), row.verdict] for row in rows
    ]
    goals = [row for row in rows if row.is_goal]
    missed = [f"{row.case} {row.measure} ({row.rival})" for row in goals if not row.is_met]
    counted = f"{len(goals) - len(missed)} of {len(goals)} rows met"
    lines = [counted, *([f"missed: {'; '.join(missed)}"] if missed else [])]
    header = ["trace", "measure", "beside", "theirs", "ours, simulated", "verdict"]
    return Report(table(title, header, cells, [*notes, *lines]), is_right=True)
