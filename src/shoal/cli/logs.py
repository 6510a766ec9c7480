"""`shoal logs`: a job's output with the rank that wrote it; follows through retries and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.show import note, print_json_line
from shoal.cli.text import log_text, one_line
from shoal.client.stream import StreamEvent


def logs(
    job: JobRef,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Until the job ends.")
    ] = False,
    rank: Annotated[int | None, Parameter(name=["--rank", "-r"], help="Only this rank.")] = None,
    tail: Annotated[int | None, Parameter(name=["--tail", "-n"], help="Only the last lines.")] = None,
    attempt: Annotated[int | None, Parameter(help="An earlier attempt, 1 being the first.")] = None,
    timestamps: Annotated[bool, Parameter(name=["--timestamps", "-t"], negative="", help="When.")] = False,
    json: JsonFlag = False,
) -> int:
    """Print a job's output, each line after the rank that wrote it. Escape sequences are removed.

    The name of an array stands for its newest element.
    """
    with connect() as shoal:
        job = one_job(shoal, job)
        if follow and attempt is None:
            print_stream(shoal.follow_logs(job, rank=rank, tail=tail), timestamps=timestamps, json=json)
            return 0
        for line in shoal.logs(job, rank=rank, attempt=attempt, tail=tail):
            print_line(line, timestamps=timestamps, json=json)
    return 0


def print_stream(events: Iterable[StreamEvent], *, timestamps: bool, json: bool) -> dict[str, Any]:
    """Print lines as they come and return what the `end` event said."""
    for event in events:
        if event.kind == "line":
            print_line(event.data, timestamps=timestamps, json=json)
        elif json:
            print_json_line({"event": event.kind, **event.data})
        elif event.kind == "attempt":
            note(attempt_text(event.data))
        if event.kind == "end":
            return dict(event.data)
    return {}


def attempt_text(data: dict[str, Any]) -> str:
    nodes = [one_line(name) for name in data.get("nodes") or ()]
    shown = ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")
    word = "started" if data.get("epoch") == 1 else f"attempt {data.get('epoch')} started"
    return f"-- {word} on {shown}" if shown else f"-- {word}"


def print_line(line: dict[str, Any], *, timestamps: bool, json: bool) -> None:
    if json:
        print_json_line(line)
        return
    when = f"{clock_text(line['at'])} " if timestamps else ""
    who = "shoal" if line.get("rank") is None else str(line["rank"])
    print(f"{when}[{who}] {log_text(line.get('text') or '')}", flush=True)


def clock_text(at: float) -> str:
    """Local time of day with milliseconds."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))}.{int(at * 1000) % 1000:03d}"
