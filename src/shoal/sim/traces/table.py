"""Traces as CSV with a header line: Philly, Microsoft ITP, and any table that uses Shoal's own column names.

`SHOAL` documents those names. A table may also be a tar file of several tables, one per cluster. The name of
the file inside is then the job's project.
"""

from __future__ import annotations

import csv
import math
import tarfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import msgspec

from shoal.sim.traces.trace import TraceError, TraceJob, malformed, open_text, tables_in


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """The table's name for each field of `TraceJob`. None if it has no such column."""

    submitted_at: str
    """Seconds, or `2017-10-09 07:01:55`, read as UTC."""
    run_s: str
    job_id: str | None = None
    """Without an id, the number of the line is the id."""
    limit_s: str | None = None
    num_processors: str | None = None
    num_gpus: str | None = None
    num_cpus: str | None = None
    memory_bytes: str | None = None
    num_nodes: str | None = None
    user: str | None = None
    group: str | None = None
    name: str | None = None
    project: str | None = None
    queue: str | None = None


REQUIRED = frozenset({"submitted_at", "run_s"})
SHOAL = Columns(**{field: field for field in Columns.__struct_fields__})
"""`submitted_at` and `run_s` are required. Every other column may be missing, and a cell may be empty."""
PHILLY = Columns(submitted_at="timestamp", run_s="duration", num_gpus="num_gpus", project="cluster")
ITP = Columns(job_id="job_id", submitted_at="submission_time", run_s="duration", num_gpus="num_gpu")


def read_table(path: Path, columns: Columns = SHOAL) -> Iterator[TraceJob]:
    """The jobs in the order of the file or files. A trace need not be in order of time."""
    if path.is_file() and tarfile.is_tarfile(path):
        for name, lines in tables_in(path):
            yield from _jobs(f"{path}/{name}.csv", lines, columns, project=name)
        return
    with open_text(path) as lines:
        yield from _jobs(str(path), lines, columns, project=None)


def _jobs(where: str, lines: TextIO, columns: Columns, project: str | None) -> Iterator[TraceJob]:
    rows = csv.reader(lines)
    readers = _readers(where, next(rows, []), columns)
    base = {"project": project} if project is not None else {}
    for row in rows:
        if not row:
            continue
        number = rows.line_num
        fields: dict[str, Any] = {"job_id": str(number), **base}
        for field, place, read in readers:
            if place >= len(row):
                raise malformed(where, number, f"{len(row)} cells, column `{field}` is number {place + 1}")
            if row[place]:
                try:
                    fields[field] = read(row[place])
                except ValueError:
                    raise malformed(where, number, f"`{field}` cannot be `{row[place]}`") from None
        missing = REQUIRED - fields.keys()
        if missing:
            raise malformed(where, number, f"no {' and no '.join(f'`{field}`' for field in sorted(missing))}")
        yield TraceJob(**fields)


def _readers(where: str, header: list[str], columns: Columns) -> list[tuple[str, int, Callable[[str], Any]]]:
    """For each job field in this table: its column, and a function that reads it."""
    places = {name.strip(): place for place, name in enumerate(header)}
    readers = []
    for field in Columns.__struct_fields__:
        name = getattr(columns, field)
        if name in places:
            readers.append((field, places[name], READ.get(field, str)))
        elif field in REQUIRED or (name is not None and columns is not SHOAL):
            raise TraceError(f"{where}:1: no column `{name}`; there are {', '.join(header) or 'none'}")
    return readers


def _seconds(text: str) -> float:
    """Whole seconds stay whole. No duration is negative or infinite."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return int(value) if value.is_integer() else value


def _moment(text: str) -> float:
    try:
        return _seconds(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        return _seconds(str((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()))


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


READ: dict[str, Callable[[str], Any]] = {
    "submitted_at": _moment,
    "run_s": _seconds,
    "limit_s": _seconds,
    "num_processors": _count,
    "num_gpus": _seconds,
    "num_cpus": _seconds,
    "memory_bytes": _count,
    "num_nodes": _count,
}
