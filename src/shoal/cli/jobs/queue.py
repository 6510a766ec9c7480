"""`shoal queue`: jobs in a table that fits 80 columns, or live with `--watch`."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag, connect
from shoal.cli.output import is_bounded, print_json, screen_columns, table
from shoal.cli.text import duration, joined_lines, one_line, shorten
from shoal.client.connection import Connection
from shoal.errors import ShoalError

Status = Literal["queued", "starting", "running", "stopping", "succeeded", "failed", "cancelled"]
OPEN = ("queued", "starting", "running", "stopping")
MAX_EXPLAINED = 20
"""Each explanation is one more request, and people do not read beyond a screenful."""
WATCH_S = 2.0
NAME_COLUMNS = 16
WIDE = 110
"""From this width on a sentence is printed instead of a word."""


def queue(
    *,
    project: Annotated[str | None, Parameter(name=["--project", "-p"], help="Only this project.")] = None,
    status: Annotated[
        tuple[Status, ...], Parameter(negative="", help="Only jobs with this status; may be repeated.")
    ] = (),
    owner: Annotated[str | None, Parameter(help="Only this user's jobs.")] = None,
    name: Annotated[str | None, Parameter(help="Only jobs of this name.")] = None,
    everything: Annotated[
        bool, Parameter(name=["--all", "-a"], negative="", help="List jobs that have ended, too.")
    ] = False,
    limit: Annotated[int, Parameter(name=["--limit", "-n"], help="At most this many, the newest (50).")] = 50,
    predict: Annotated[bool, Parameter(negative="", help="Predict when waiting jobs will start.")] = False,
    watch: Annotated[
        bool, Parameter(name=["--watch", "-w"], negative="", help="Keep the screen up to date.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """List jobs, newest first: those that have not ended, or all with `--all`."""
    wanted = status or (() if everything else OPEN)
    with connect() as shoal:
        while True:
            page = shoal.jobs(
                project=project, status=wanted, owner=owner, name=name, limit=limit, predict=predict
            )
            jobs = list(page)
            if json:
                print_json(jobs)
                return 0
            text = screen(shoal, jobs, limit, is_all=bool(everything or status), predict=predict)
            draw(text, is_live=watch)
            if not watch:
                return 0
            time.sleep(WATCH_S)


def draw(text: str, *, is_live: bool) -> None:
    """Print the text. A live screen starts at the top left of an empty terminal."""
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
        last, last_cells = "STARTS IN", {job["job_id"]: starts_in(job, now) for job in jobs}
    else:
        last, last_cells = "WHY", explanations(shoal, jobs)
    rows = [row(job, now, last_cells.get(job["job_id"], "")) for job in jobs]
    text = table(("JOB", "NAME", "OWNER", "STATUS", "AGE", "NODES", last), rows, elastic=last)
    return f"{text}\nthe newest {limit}; more with `--limit`" if len(jobs) == limit else text


def starts_in(job: dict[str, Any], now: float) -> str:
    """Return `12m to 3h05m`; "" for a job that does not wait."""
    outlook = job.get("outlook")
    if not outlook:
        return ""
    earliest, latest = outlook.get("earliest"), outlook.get("latest")
    if latest is None:
        return "not known"
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
        joined_lines(reason or job.get("because") or ""),
    )


def name_of(job: dict[str, Any]) -> str:
    """Return the job's name; an array element adds its index, a replica its release and slot: `chat@2.7`."""
    array, replica = job.get("array"), job.get("replica")
    index = f"[{array['index']}]" if array else ""
    if replica:
        index = f"@{replica['release']}.{replica['slot']}"
    return fitting(job.get("name") or "", NAME_COLUMNS - len(index)) + index


def fitting(text: str, columns: int) -> str:
    """Return the text on one line, cut to `columns` on a screen."""
    return shorten(one_line(text), columns) if is_bounded() else one_line(text)


def nodes_of(job: dict[str, Any]) -> str:
    """Return the first node and how many more; for a job without nodes, the number requested."""
    names = job.get("nodes") or []
    if not names:
        requested = (job.get("request") or {}).get("nodes")
        return f"({requested})" if requested else "-"
    more = f"+{len(names) - 1}" if len(names) > 1 else ""
    return fitting(names[0], 12) + more


def explanations(shoal: Connection, jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Return why each job does not run, for the first `MAX_EXPLAINED`. A job that started has no entry."""
    reasons = {}
    for job in [job for job in jobs if job["status"] in ("queued", "starting")][:MAX_EXPLAINED]:
        try:
            reply = shoal.why(job["job_id"])
        except ShoalError:
            continue
        explanation = reply.get("explanation") or {}
        if reply.get("status") not in ("queued", "starting") or (
            reply["status"] == "starting" and not explanation
        ):
            continue  # `is running on n2` is not a reason
        word = str(explanation.get("why") or "").replace("_", " ")
        word = str((explanation.get("facts") or {}).get("in_short") or word)
        is_narrow = bool(word) and screen_columns() < WIDE
        details = (explanation.get("details") or ()) if explanation.get("why") == "not_begun" else ()
        sentence = next(iter(details), reply.get("sentence"))  # the NODES column shows where it was placed
        reasons[job["job_id"]] = word if is_narrow else str(sentence or word)
    return reasons
