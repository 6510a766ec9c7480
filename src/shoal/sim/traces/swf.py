"""The Standard Workload Format: 18 columns per job, -1 for unknown, facts about the machine in `;` comments.

https://www.cs.huji.ac.il/labs/parallel/workload/swf.html defines the columns. The format does not define what
to do with an incomplete job, so `SwfRules` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from shoal.sim.traces.trace import TraceJob, malformed, open_text

NUM_FIELDS = 18
# Columns, counted from 0.
JOB, SUBMIT, RUN, ALLOCATED, REQUESTED, LIMIT = 0, 1, 3, 4, 7, 8
USER, GROUP, EXECUTABLE, QUEUE = 11, 12, 13, 14


class Size(StrEnum):
    """Which of the two processor columns counts."""

    ALLOCATED = "allocated"  # the requested number if none was allocated
    LARGEST = "largest"  # the larger of the two


class MissingLimit(StrEnum):
    """The limit of a job without a requested time."""

    NONE = "none"
    RUN = "run"


class SwfRules(msgspec.Struct, frozen=True, kw_only=True):
    size: Size = Size.ALLOCATED
    missing_limit: MissingLimit = MissingLimit.NONE
    is_limit_raised_to_run: bool = False
    """Logs let jobs overrun a little. A simulated scheduler that plans by limits must never see that."""
    is_empty_run_dropped: bool = True
    """Jobs of 0 s: cancelled while they waited, or rounded down."""
    is_sizeless_dropped: bool = True
    """Jobs without processors in either column. If they are kept, they get one."""


def read_header(path: Path) -> dict[str, str]:
    """The facts before the first job (`MaxProcs`, `UnixStartTime`, ...). Lines of a repeated
    key are joined.
    """
    facts: dict[str, str] = {}
    with open_text(path) as lines:
        for line in lines:
            if not line.startswith(";"):
                if line.strip():
                    break
                continue
            key, separator, value = line.lstrip("; \t").partition(":")
            if separator and key.isidentifier():
                facts[key] = f"{facts[key]}\n{value.strip()}" if key in facts else value.strip()
    return facts


def read_swf(
    path: Path, rules: SwfRules | None = None, *, dropped: Counter[str] | None = None
) -> Iterator[TraceJob]:
    """The jobs in the order of the file. `dropped` counts, by reason, the jobs that the rules left out."""
    rules = rules or SwfRules()
    dropped = Counter() if dropped is None else dropped
    with open_text(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith(";") or not line.strip():
                continue
            fields = line.split()
            if len(fields) != NUM_FIELDS:
                raise malformed(
                    path, number, f"{len(fields)} columns, a job has {NUM_FIELDS}: `{line.strip()[:80]}`"
                )
            try:
                job = _job(fields, rules)
            except ValueError as error:
                raise malformed(path, number, f"not a number: {error}") from None
            if isinstance(job, str):
                dropped[job] += 1
            else:
                yield job


def _job(fields: list[str], rules: SwfRules) -> TraceJob | str:
    """The job, or the reason why the rules drop it."""
    run_s = _number(fields[RUN])
    if run_s <= 0 and rules.is_empty_run_dropped:
        return "no run time"
    allocated, requested = int(fields[ALLOCATED]), int(fields[REQUESTED])
    is_larger = rules.size is Size.LARGEST and requested > allocated
    size = requested if allocated <= 0 or is_larger else allocated
    if size <= 0:
        if rules.is_sizeless_dropped:
            return "no processors"
        size = 1
    return TraceJob(
        job_id=fields[JOB],
        submitted_at=_number(fields[SUBMIT]),
        run_s=run_s,
        limit_s=_limit(_number(fields[LIMIT]), run_s, rules),
        num_processors=size,
        user=_text_or_none(fields[USER]),
        group=_text_or_none(fields[GROUP]),
        name=_text_or_none(fields[EXECUTABLE]),
        queue=_text_or_none(fields[QUEUE]),
    )


def _limit(limit_s: float, run_s: float, rules: SwfRules) -> float | None:
    if limit_s <= 0:
        return run_s if rules.missing_limit is MissingLimit.RUN else None
    return max(limit_s, run_s) if rules.is_limit_raised_to_run else limit_s


def _number(text: str) -> float:
    """Whole seconds stay whole, so that sums of them are exact."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def _text_or_none(text: str) -> str | None:
    return None if text == "-1" else text
