"""`shoal why`: the one dominant reason a job does not run, or how it ended."""

from __future__ import annotations

import sys
import time
from typing import Any

from shoal.cli.flags import JobRef, JsonFlag, connect, resolve_job
from shoal.cli.jobs.logs import ending_text
from shoal.cli.jobs.queue import nodes_of
from shoal.cli.output import folded, note, print_json, table
from shoal.cli.text import clean_lines, duration, one_line, utc, written_files_text
from shoal.client.connection import Connection
from shoal.errors import LimitReached


def why(job: JobRef, *, json: JsonFlag = False) -> int:
    """Explain why a job is not running, when it will start, what would start it now, or how it ended.

    The name of an array stands for its newest element, the name of a service
    for a live replica of the release that serves.
    """
    with connect() as shoal:
        reply = _fetch(shoal, resolve_job(shoal, job))
    if json:
        print_json(reply)
    else:
        lines = [folded(line) if sys.stdout.isatty() else line for line in explanation_lines(reply)]
        print("\n".join([*lines, *history_lines(reply)]))
    return 0


def _fetch(shoal: Connection, job_id: str) -> dict[str, Any]:
    """Fetch the explanation, without the predicted start if the server is too busy to compute it."""
    try:
        return shoal.why(job_id, predict=True)
    except LimitReached as busy:
        note(f"note: no predicted start: {busy.message}; {busy.hint}")
        return shoal.why(job_id)


def explanation_lines(reply: dict[str, Any]) -> list[str]:
    """Return `waiting: SENTENCE`, indented details, the predicted start, and a hint if there is one."""
    explanation = reply.get("explanation") or {}
    sentence, *last_words = clean_lines(reply["sentence"])
    lines = [f"waiting: {sentence}" if reply["status"] == "queued" and explanation else sentence]
    lines += [f"  {line}" for line in last_words]
    lines += [f"  {one_line(detail)}" for detail in explanation.get("details") or ()]
    outlook = reply.get("outlook") or {}
    if outlook:
        lines.append(f"outlook: {one_line(outlook['sentence'])}")
    lines += [f"change: {one_line(change['sentence'])}" for change in outlook.get("changes") or ()]
    if outlook.get("not_looked"):
        lines.append(f"note: {one_line(outlook['not_looked'])}")
    if explanation.get("hint"):
        lines.append(f"hint: {one_line(explanation['hint'])}")
    return lines


def history_lines(reply: dict[str, Any]) -> list[str]:
    """Return the attempts so far and how they ended; nothing while the first one waits."""
    job, attempts = reply.get("job") or {}, reply.get("attempts") or []
    if not attempts or (reply["status"] == "queued" and len(attempts) == 1):
        return []
    heads = ("ATTEMPT", "NODES", "BEGAN (UTC)", "RAN", "HOW IT ENDED")
    rows = [_row(attempt) for attempt in attempts]
    lines = table(
        heads, rows, elastic=heads[-1], wraps=True
    ).splitlines()  # the costs of a preemption are long
    lines += _restart_lines(attempts[-1])
    lines += process_group_lines(job, attempts[-1])
    if job.get("ended_at"):
        code = job.get("exit_code")
        took = duration(job["ended_at"] - job["submitted_at"])
        lines.append(f"took {took} from submit to end" + (f"; exit code {code}" if code is not None else ""))
    if reply["status"] == "failed" and reply["max_failures"] > 1:
        used = job["failures"]
        lost = sum(attempt.get("reason") in ("lost", "fenced") for attempt in attempts)
        more = f"; {lost} more lost by the cluster, which are not counted" if lost else ""
        again = "; restarts of ranks in place count too" if _num_restarts(attempts) else ""
        lines.append(f"{used} of {reply['max_failures']} failures used{again}{more}")
    if job.get("ended_at") and attempts[-1].get("written"):
        lines.append(written_files_text(attempts[-1]["written"], reply.get("checkpoint")))
    if reply.get("checkpoint_dir"):
        lines.append(f"checkpoint: {one_line(reply['checkpoint_dir'])}")
    return lines


def process_group_lines(job: dict[str, Any], attempt: dict[str, Any]) -> list[str]:
    """Say whether the ranks formed one process group; nothing if they did or if there is one rank."""
    ranks = ((job.get("request") or {}).get("ranks_per_node") or 1) * len(attempt.get("nodes") or ())
    world = attempt.get("world")
    if ranks < 2 or attempt.get("started_at") is None or (world and world["is_whole"]):
        return []
    if world is None:
        is_well = attempt.get("reason") in (None, "succeeded")
        return [f"world: its {ranks} ranks formed no process group that Shoal saw"] if is_well else []
    largest = f"the largest process group of its {ranks} ranks has {world['size']}"
    return [f"world: {largest} and does not span the job: its ranks worked separately"]


def _num_restarts(attempts: list[dict[str, Any]]) -> int:
    return sum(attempt.get("rendezvous_round") or 0 for attempt in attempts)


def _restart_lines(attempt: dict[str, Any]) -> list[str]:
    """Say why the ranks were last restarted in this attempt, with the traceback if there was one."""
    count, lines = attempt.get("rendezvous_round") or 0, clean_lines(attempt.get("failure") or "")
    if not count or not lines:
        return []
    times = "once" if count == 1 else f"{count} times"
    text = [f"its ranks were restarted {times} in this attempt, last because {lines[0]}"]
    return text if len(lines) == 1 else [*text, "  its last output", *(f"    {line}" for line in lines[1:])]


def _row(attempt: dict[str, Any]) -> tuple[str, ...]:
    began, ended = attempt.get("started_at"), attempt.get("ended_at")
    until = ended if ended is not None else time.time()
    return (
        str(attempt["epoch"]),
        nodes_of(attempt),
        "-" if began is None else utc(began, "%m-%d %H:%M:%S"),
        "-" if began is None else duration(until - began),
        ending_text(attempt) if ended is not None else str(attempt["state"]),
    )
