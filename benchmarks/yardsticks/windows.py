"""Mean bounded slowdown in ten windows of 1,024 jobs, as RLScheduler (Zhang et al., SC'20) defines and prints
it.
"""

from __future__ import annotations

from statistics import fmean

from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.section import Report, Section, Traces
from shoal.sim.loop import EventBatching, Processors, simulate
from shoal.sim.references.backfilling import FixedHead, Order, f1, first_come, shortest
from shoal.sim.report import slowdowns
from shoal.sim.traces.swf import MissingLimit, Size, SwfRules, read_swf
from shoal.sim.traces.trace import TraceJob

LENGTH = 1024
STARTS = (1981, 2756, 4299, 8850, 3316, 2714, 5228, 7762, 4022, 7085)
RULES = SwfRules(size=Size.LARGEST, missing_limit=MissingLimit.RUN)
ORDERS: tuple[tuple[str, Order], ...] = (("FCFS", first_come), ("SJF", shortest), ("F1", f1))
LOGS = (("Lublin-1", "swf/lublin_256.swf.gz", 256), ("HPC2N", "swf/HPC2N-2002-2.2-cln.swf.gz", 240))
PUBLISHED = {
    ("Lublin-1", False): ("7273.77", "277.35", "258.37"),
    ("HPC2N", False): ("297.18", "157.71", "118.01"),
    ("Lublin-1", True): ("235.82", "73.31", "75.07"),
    ("HPC2N", True): ("127.38", "122.04", "71.95"),
}


def mean_slowdown(jobs: list[TraceJob], capacity: int, order: Order, *, is_backfilling: bool) -> float:
    """Over the jobs of each window, then over the windows."""
    windows = [jobs[start : start + LENGTH] for start in STARTS]
    return fmean(
        float(
            slowdowns(
                simulate(
                    window,
                    Processors(capacity),
                    FixedHead(order, is_backfilling=is_backfilling),
                    events=EventBatching.ONE_BY_ONE,
                )
            ).mean()
        )
        for window in windows
    )


def run(traces: Traces) -> Report:
    jobs = {name: list(read_swf(traces.path(file), RULES)) for name, file, _ in LOGS}
    gates = []
    for is_backfilling in (False, True):
        for log, _, capacity in LOGS:
            for (name, order), published in zip(ORDERS, PUBLISHED[log, is_backfilling], strict=True):
                ours = mean_slowdown(jobs[log], capacity, order, is_backfilling=is_backfilling)
                gates.append(Gate(log, f"{name} + EASY" if is_backfilling else name, published, ours))
    return report(SECTION.title, gates)


SECTION = Section(
    name="windows",
    title="Windows: mean bounded slowdown, 10 windows of 1,024 jobs, RLScheduler's rules",
    needs=tuple(file for _, file, _ in LOGS),
    run=run,
)
