"""`shoal why`: the one dominant reason a job does not run, or how it ended."""

from __future__ import annotations

import sys
import time
from typing import Any

from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.logs import ending_of
from shoal.cli.queue import nodes_of
from shoal.cli.show import folded, note, print_json, table
from shoal.cli.text import duration, lines_of, one_line, told_written, utc
from shoal.client.connection import Connection
from shoal.errors import LimitReached


def why(job: JobRef, *, json: JsonFlag = False) -> int:
    """Say why a job is not running, when it will start, what would start it now, or how it ended.

    The name of an array stands for its newest element, that of a service for
    a replica that lives, of the release that serves.
    """
    with connect() as shoal:
        told = _told(shoal, one_job(shoal, job))
    if json:
        print_json(told)
    else:
        found = [folded(line) if sys.stdout.isatty() else line for line in lines(told)]
        print("\n".join([*found, *history(told)]))
    return 0


def _told(shoal: Connection, job_id: str) -> dict[str, Any]:
    """Why it waits is told also where the server has no time to say when it starts."""
    try:
        return shoal.why(job_id, predict=True)
    except LimitReached as busy:
        note(f"note: not when it starts: {busy.message}; {busy.hint}")
        return shoal.why(job_id)


def lines(told: dict[str, Any]) -> list[str]:
    """`waiting: SENTENCE`, details indented, when it starts, and what to type if there is something."""
    explanation = told.get("explanation") or {}
    sentence, *last_words = lines_of(told["sentence"])
    found = [f"waiting: {sentence}" if told["status"] == "queued" and explanation else sentence]
    found += [f"  {line}" for line in last_words]
    found += [f"  {one_line(detail)}" for detail in explanation.get("details") or ()]
    outlook = told.get("outlook") or {}
    if outlook:
        found.append(f"outlook: {one_line(outlook['sentence'])}")
    found += [f"change: {one_line(change['sentence'])}" for change in outlook.get("changes") or ()]
    if outlook.get("not_looked"):
        found.append(f"note: {one_line(outlook['not_looked'])}")
    if explanation.get("hint"):
        found.append(f"hint: {one_line(explanation['hint'])}")
    return found


def history(told: dict[str, Any]) -> list[str]:
    """Its attempts so far and what they came to; nothing while the first one waits."""
    job, attempts = told.get("job") or {}, told.get("attempts") or []
    if not attempts or (told["status"] == "queued" and len(attempts) == 1):
        return []
    heads = ("ATTEMPT", "NODES", "BEGAN (UTC)", "RAN", "HOW IT ENDED")
    rows = [_row(attempt) for attempt in attempts]
    found = table(heads, rows, elastic=heads[-1], wraps=True).splitlines()  # the bill of an eviction is long
    found += _restarts(attempts[-1])
    found += world_of(job, attempts[-1])
    if job.get("ended_at"):
        code = job.get("exit_code")
        took = duration(job["ended_at"] - job["submitted_at"])
        found.append(f"took {took} from submit to end" + (f"; exit code {code}" if code is not None else ""))
    if told["status"] == "failed" and told["max_failures"] > 1:
        used = job["failures"]
        lost = sum(attempt.get("reason") in ("lost", "fenced") for attempt in attempts)
        more = f"; {lost} more lost by the cluster, which are not counted" if lost else ""
        again = "; ranks that began anew where they are count too" if _num_restarts(attempts) else ""
        found.append(f"{used} of {told['max_failures']} failures used{again}{more}")
    if job.get("ended_at") and attempts[-1].get("written"):
        found.append(told_written(attempts[-1]["written"], told.get("checkpoint")))
    if told.get("checkpoint_dir"):
        found.append(f"checkpoint: {one_line(told['checkpoint_dir'])}")
    return found


def world_of(job: dict[str, Any], attempt: dict[str, Any]) -> list[str]:
    """Whether the ranks of a job of several have found each other; nothing if they have."""
    ranks = ((job.get("request") or {}).get("ranks_per_node") or 1) * len(attempt.get("nodes") or ())
    world = attempt.get("world")
    if ranks < 2 or attempt.get("started_at") is None or (world and world["is_whole"]):
        return []
    if world is None:
        is_well = attempt.get("reason") in (None, "succeeded")
        return [f"world: its {ranks} ranks formed no process group that Shoal saw"] if is_well else []
    largest = f"the largest process group of its {ranks} ranks has {world['size']}"
    return [f"world: {largest} and does not span the job: ranks worked apart"]


def _num_restarts(attempts: list[dict[str, Any]]) -> int:
    return sum(attempt.get("generation") or 0 for attempt in attempts)


def _restarts(attempt: dict[str, Any]) -> list[str]:
    """Why its ranks last began anew in this attempt, with the traceback if there was one."""
    count, lines = attempt.get("generation") or 0, lines_of(attempt.get("failure") or "")
    if not count or not lines:
        return []
    times = "once" if count == 1 else f"{count} times"
    told = [f"its ranks began anew {times} in this attempt, last because {lines[0]}"]
    return told if len(lines) == 1 else [*told, "  before that it said", *(f"    {one}" for one in lines[1:])]


def _row(attempt: dict[str, Any]) -> tuple[str, ...]:
    began, ended = attempt.get("started_at"), attempt.get("ended_at")
    until = ended if ended is not None else time.time()
    return (
        str(attempt["epoch"]),
        nodes_of(attempt),
        "-" if began is None else utc(began, "%m-%d %H:%M:%S"),
        "-" if began is None else duration(until - began),
        ending_of(attempt) if ended is not None else str(attempt["state"]),
    )
