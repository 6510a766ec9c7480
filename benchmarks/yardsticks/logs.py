"""Mean and worst bounded slowdown over whole logs of the Parallel Workloads Archive: EASY, its variants."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.yardsticks.gate import Gate, report
from benchmarks.yardsticks.section import Report, Section, Traces, say
from shoal.sim.loop import Processors, planned, simulate, true_run
from shoal.sim.references.backfilling import (
    Easy,
    Order,
    f1,
    first_come,
    shortest,
    shortest_in_truth,
    smallest_area,
)
from shoal.sim.report import Measures, measure
from shoal.sim.traces.swf import MissingLimit, SwfRules, read_swf
from shoal.sim.traces.trace import TraceJob

RULES = SwfRules(missing_limit=MissingLimit.RUN, is_limit_raised_to_run=True)
LOGS = (
    ("KTH", "swf/KTH-SP2-1996-2.1-cln.swf.gz", 100),
    ("CTC", "swf/CTC-SP2-1996-3.1-cln.swf.gz", 338),
    ("Curie", "swf/CEA-Curie-2011-2.1-cln.swf.gz", 80_640),
    ("HPC2N", "swf/HPC2N-2002-2.2-cln.swf.gz", 240),
)


@dataclass(frozen=True)
class Variant:
    name: str
    order: Order
    backfill: Order
    expect: Callable[[TraceJob], float]
    means: tuple[str, ...]
    """Published, in the order of `LOGS`."""
    worst: tuple[str, ...] = ()


VARIANTS = (
    Variant(
        "EASY, user limits",
        first_come,
        first_come,
        planned,
        ("86.40", "51.55", "155.90", "88.17"),
        ("14.8k", "10k", "27k", "74k"),
    ),
    Variant(
        "EASY, shortest-limit-first backfill",
        first_come,
        shortest,
        planned,
        ("65.24", "29.95", "135.33", "83.05"),
    ),
    Variant("EASY, true run times", first_come, first_come, true_run, ("71.65", "38.67", "82.96", "79.05")),
    Variant(
        "EASY shortest-first, true run times",
        first_come,
        shortest_in_truth,
        true_run,
        ("48.45", "16.13", "12.93", "64.04"),
    ),
    Variant(
        "SJF + EASY",
        shortest,
        shortest,
        planned,
        ("40.90", "33.19", "244.98", "51.44"),
        ("33k", "38k", "976k", "41k"),
    ),
    Variant(
        "smallest area first + EASY",
        smallest_area,
        smallest_area,
        planned,
        ("40.71", "36.27", "203.79", "44.66"),
    ),
    Variant(
        "F1 + EASY", f1, f1, planned, ("49.18", "21.20", "31.51", "57.95"), ("54k", "41k", "640k", "100k")
    ),
)


def replay(jobs: list[TraceJob], capacity: int, variant: Variant) -> Measures:
    decider = Easy(variant.order, variant.backfill, expect=variant.expect)
    return measure(simulate(jobs, Processors(capacity), decider, expect=variant.expect), capacity)


def run(traces: Traces) -> Report:
    means: list[Gate] = []
    worst: list[Gate] = []
    notes = []
    for place, (log, file, capacity) in enumerate(LOGS):
        began = time.process_time()
        jobs = list(read_swf(traces.path(file), RULES))
        read_s = time.process_time() - began
        for variant in VARIANTS:
            began = time.process_time()
            outcome = replay(jobs, capacity, variant)
            say(f"{log}, {variant.name}: {time.process_time() - began:.1f} CPU s")
            if variant is VARIANTS[0]:
                cpu = f"read in {read_s:.1f} CPU s, replayed with EASY in {time.process_time() - began:.1f}"
                notes.append(f"{log}: {len(jobs):,} jobs {cpu}; utilisation {outcome.utilisation:.1%}")
            means.append(Gate(log, variant.name, variant.means[place], outcome.slowdown.mean))
            if variant.worst:
                worst.append(
                    Gate(log, f"worst job, {variant.name}", variant.worst[place], outcome.slowdown.max)
                )
    return report(SECTION.title, means + worst, notes)


SECTION = Section(
    name="logs",
    title="Whole logs: mean bounded slowdown, and the worst job's",
    needs=tuple(file for _, file, _ in LOGS),
    run=run,
)
