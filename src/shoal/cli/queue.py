"""`shoal queue`: jobs in a table that fits 80 columns, or live with `--watch`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.show import is_bounded, print_json, screen_columns, table
from shoal.cli.text import duration, in_one_breath, one_line, shorten
from shoal.client.connection import Connection
from shoal.errors import ShoalError

Status = Literal["queued", "starting", "running", "stopping", "succeeded", "failed", "cancelled"]
OPEN = ("queued", "starting", "running", "stopping")
MAX_EXPLAINED = 20
"""Each explanation is one more request: beyond a screenful nobody reads them."""
WATCH_S = 2.0
NAME_COLUMNS = 16
WIDE = 110
"""Columns from which on the sentence says more than one word would."""


def queue(
    *,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    status: Annotated[tuple[Status, ...], Parameter(negative="", help="Only these; may be repeated.")] = (),
    owner: Annotated[str | None, Parameter(help="Only this user's jobs.")] = None,
    name: Annotated[str | None, Parameter(help="Only jobs of this name.")] = None,
    everything: Annotated[
        bool, Parameter(name=["--all", "-a"], negative="", help="Also jobs that have ended.")
    ] = False,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="At most this many, the newest (50).")] = 50,
    predict: Annotated[bool, Parameter(negative="", help="In how long those that wait will start.")] = False,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], negative="", help="Keep it up to date.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """List jobs, newest first: those that have not ended, or all with `--all`."""
    wanted = status or (() if everything else OPEN)
    with connect() as shoal:
        while True:
            asked = shoal.jobs(
                project=project, status=wanted, owner=owner, name=name, limit=limit, predict=predict
            )
            jobs = list(asked)
            if json:
                print_json(jobs)
                return 0
            text = screen(shoal, jobs, limit, is_all=bool(everything or status), predict=predict)
            draw(text, is_live=watch)
            if not watch:
                return 0
            time.sleep(WATCH_S)


def draw(text: str, *, is_live: bool) -> None:
    """Print; a live screen starts at the top left of an empty terminal."""
    if is_live and sys.stdout.isatty():
        print("\x1b[H\x1b[2J", end="")
    print(text, flush=True)


def screen(
    shoal: Connection, jobs: list[dict[str, Any]], limit: int, *, is_all: bool, predict: bool = False
) -> str:
    if not jobs:
        return "no jobs" if is_all else "no open jobs (`shoal queue --all` lists the ended ones)"
    now = time.time()
    if predict:
        last, told = "STARTS IN", {job["job_id"]: starts_in(job, now) for job in jobs}
    else:
        last, told = "WHY", explanations(shoal, jobs)
    rows = [row(job, now, told.get(job["job_id"], "")) for job in jobs]
    text = table(("JOB", "NAME", "OWNER", "STATUS", "AGE", "NODES", last), rows, elastic=last)
    return f"{text}\nthe newest {limit}; more with `--limit`" if len(jobs) == limit else text


def starts_in(job: dict[str, Any], now: float) -> str:
    """`12m to 3h05m`; nothing for a job that does not wait."""
    outlook = job.get("outlook")
    if not outlook:
        return ""
    earliest, latest = outlook.get("earliest"), outlook.get("latest")
    if latest is None:
        return "nobody can say"
    if earliest is None or earliest <= now:
        return f"up to {duration(latest - now)}"
    return f"{duration(earliest - now)} to {duration(latest - now)}"


def row(job: dict[str, Any], now: float, reason: str) -> tuple[str, ...]:
    return (
        job["ref"],
        name_of(job),
        fitting(job.get("owner") or "", 8),
        job["status"],
        duration(now - job["submitted_at"]),
        nodes_of(job),
        in_one_breath(reason or job.get("because") or ""),
    )


def name_of(job: dict[str, Any]) -> str:
    """Its name; of an array's element with its index, of a replica with its release and slot: `chat@2.7`."""
    array, replica = job.get("array"), job.get("replica")
    index = f"[{array['index']}]" if array else ""
    if replica:
        index = f"@{replica['release']}.{replica['slot']}"
    return fitting(job.get("name") or "", NAME_COLUMNS - len(index)) + index


def fitting(text: str, columns: int) -> str:
    """On one line, and on a screen no wider than its column."""
    return shorten(one_line(text), columns) if is_bounded() else one_line(text)


def nodes_of(job: dict[str, Any]) -> str:
    """The first node and how many more; for a job without nodes, how many it asks for."""
    names = job.get("nodes") or []
    if not names:
        asked = (job.get("request") or {}).get("nodes")
        return f"({asked})" if asked else "-"
    more = f"+{len(names) - 1}" if len(names) > 1 else ""
    return fitting(names[0], 12) + more


def explanations(shoal: Connection, jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Why each job does not run yet, for the first screenful. A job that moved on meanwhile has none."""
    found = {}
    for job in [job for job in jobs if job["status"] in ("queued", "starting")][:MAX_EXPLAINED]:
        try:
            told = shoal.why(job["job_id"])
        except ShoalError:
            continue
        explanation = told.get("explanation") or {}
        if told.get("status") not in ("queued", "starting") or (
            told["status"] == "starting" and not explanation
        ):
            continue  # `is running on n2` is no reason
        word = str(explanation.get("why") or "").replace("_", " ")
        word = str((explanation.get("facts") or {}).get("in_short") or word)
        is_narrow = bool(word) and screen_columns() < WIDE
        details = (explanation.get("details") or ()) if explanation.get("why") == "not_begun" else ()
        sentence = next(iter(details), told.get("sentence"))  # where it was placed stands beside it
        found[job["job_id"]] = word if is_narrow else str(sentence or word)
    return found
