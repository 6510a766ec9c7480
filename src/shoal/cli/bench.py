"""Processes that simulate, and a word on how many simulations are done: a bar, or lines in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Self

from shoal.cli.progress import long_work

if TYPE_CHECKING:
    from shoal.sim.report import Report
    from shoal.sim.scenario import Scenario

Tell = Callable[[int, int, str], None]
"""So many are done, of so many, and what they are about."""


class Bench:
    def __init__(self, at_once: int) -> None:
        from shoal.sim.scenario import pool

        self._pool = pool(at_once)
        self._shown = ExitStack()
        self._num_done = 0
        self._tell: Tell

    def __enter__(self) -> Self:
        self._tell = self._shown.enter_context(_bar() if sys.stderr.isatty() else _lines())
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def simulate(self, scenarios: Sequence[Scenario]) -> list[Report]:
        from concurrent.futures import as_completed

        from shoal.sim.smallest import simulated

        sizes = ", ".join(f"{one.workload.capacity:,.0f}" for one in scenarios)
        about = f"on {sizes} {scenarios[0].workload.device}s"
        total = self._num_done + len(scenarios)
        self._tell(self._num_done, total, about)
        futures = [self._pool.submit(simulated, one) for one in scenarios]
        for _ in as_completed(futures):
            self._num_done += 1
            self._tell(self._num_done, total, about)
        return [future.result() for future in futures]


@contextmanager
def _bar() -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=0)
        yield lambda done, total, about: bar.update(task, completed=done, total=total, description=about)


@contextmanager
def _lines() -> Iterator[Tell]:
    with long_work("simulating") as say:
        yield lambda done, total, about: say(f"simulating {about}, {done} of {total} simulations done")
