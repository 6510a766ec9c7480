"""A gate: a published number that the simulator must reproduce before its other numbers are believed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.measure import table
from benchmarks.yardsticks.section import Report

THOUSANDS = "k"
SIGMAS = 3.0
"""How many standard errors two means of random runs may differ and still count as equal."""


@dataclass(frozen=True)
class Gate:
    """`published` is the text in the paper. Our number is printed with its decimals, and its `k` for
    thousands.
    """

    case: str
    policy: str
    published: str
    ours: float
    error: float | None = None
    """The standard error of the difference, for means of random runs; None if the number is exact."""

    @property
    def shown(self) -> str:
        """Our number, as the paper would print it."""
        plain = self.published.removesuffix(THOUSANDS)
        decimals = len(plain.partition(".")[2])
        if plain == self.published:
            return f"{self.ours:.{decimals}f}"
        return f"{self.ours / 1000:.{decimals}f}{THOUSANDS}"

    @property
    def difference(self) -> float:
        plain = self.published.removesuffix(THOUSANDS)
        return self.ours - float(plain) * (1 if plain == self.published else 1000)

    @property
    def is_right(self) -> bool:
        if self.shown == self.published:
            return True
        return self.error is not None and abs(self.difference) <= SIGMAS * self.error

    @property
    def verdict(self) -> str:
        if self.shown == self.published:
            return "equal"
        if self.error is None:
            return f"differs by {self.difference:+.2f}"
        sigmas = abs(self.difference) / self.error if self.error else math.inf
        return f"{self.difference:+.2f}, {sigmas:.1f} standard errors"


def report(title: str, gates: Sequence[Gate], notes: Sequence[str] = ()) -> Report:
    rows = [[gate.case, gate.policy, gate.published, gate.shown, gate.verdict] for gate in gates]
    right = sum(gate.is_right for gate in gates)
    counted = f"{right} of {len(gates)} as published"
    header = ["trace", "policy", "published", "ours", "verdict"]
    return Report(table(title, header, rows, [*notes, counted]), is_right=right == len(gates))
