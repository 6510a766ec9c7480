"""`shoal logs`: a job's output with the rank that wrote it; follows through retries and restarts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, one_job
from shoal.cli.show import note, print_json_line
from shoal.cli.text import lines_of, log_text, one_line, utc
from shoal.client.connection import Connection
from shoal.client.handles import ENDED
from shoal.client.stream import Reach, StreamEvent
from shoal.errors import ServerUnreachable, SpecError

ENDINGS = {
    **dict.fromkeys(("exit", "signal", "oom", "setup", "world", "time_limit"), "failed"),
    "fenced": "lost",
    "preempted": "gave way",
}
"""Of `EndReason`, for people; the others are words already."""


def logs(
    job: JobRef,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Until the job ends.")
    ] = False,
    rank: Annotated[int | None, Parameter(name=["--rank", "-r"], help="Only this rank.")] = None,
    tail: Annotated[int | None, Parameter(name=["--tail", "-n"], help="Only the last lines.")] = None,
    attempt: Annotated[int | None, Parameter(help="An earlier attempt, 1 being the first.")] = None,
    timestamps: Annotated[
        bool, Parameter(name=["--timestamps", "-t"], negative="", help="When, in UTC.")
    ] = False,
    stacks: Annotated[
        bool, Parameter(name="--stacks", negative="", help="Where its ranks stood when they hung.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Print a job's output, each line after the rank that wrote it. Escape sequences are removed.

    The name of an array stands for its newest element, that of a service for
    a replica that lives, of the release that serves.
    """
    with connect() as shoal:
        ref, job = job, one_job(shoal, job)
        if follow and stacks:
            raise SpecError("`--stacks` are there once ranks have hung; they cannot be followed")
        told = shoal.job_data(job)
        check(told, rank)
        if attempt is None and not stacks:
            _say_earlier(told)
        if follow and attempt is None:
            _say_waiting(told)
            stream = followed(shoal, job, one_line(ref), rank=rank, tail=tail)
            print_stream(stream, timestamps=timestamps, json=json)
            return 0
        is_empty, has_peers = True, max(_node_counts(told), default=1) > 1
        for line in shoal.logs(job, rank=rank, attempt=attempt, tail=tail, stacks=stacks):
            print_line(line, timestamps=timestamps, json=json, has_peers=has_peers)
            is_empty = False
        if is_empty and stacks:
            note(no_stacks(one_line(ref), rank, attempt))
        elif is_empty and tail != 0:
            _say_waiting(told)
            _say_silent(told, rank, attempt)
    return 0


def no_stacks(ref: str, rank: int | None, attempt: int | None) -> str:
    """Of what was asked for, and no more: another attempt or rank may have some."""
    who = "" if rank is None else f" of rank {rank}"
    which = "its newest attempt" if attempt is None else f"attempt {attempt}"
    other = "" if attempt is not None else "; `--attempt N` shows an earlier one's"
    return f"-- {ref}: no stacks{who} in {which}, they are kept when ranks hang{other}"


def check(job: dict[str, Any], rank: int | None) -> None:
    """`SpecError` for a rank that the job has not."""
    request, ref = job.get("request") or {}, one_line(job["ref"])
    nodes = max(_node_counts(job), default=request.get("max_nodes") or 1)
    ranks = nodes * (request.get("ranks_per_node") or 1)
    if rank is not None and not 0 <= rank < ranks:
        has = f"{ranks} ranks, 0 to {ranks - 1}" if ranks > 1 else "one rank, 0"
        raise SpecError(f"`--rank {rank}`: job {ref} has {has}", hint=f"`shoal logs {ref}` shows all of them")


def _node_counts(job: dict[str, Any]) -> list[int]:
    """On how many nodes each attempt ran that has begun."""
    return [len(attempt["nodes"]) for attempt in job.get("attempts") or () if attempt["nodes"]]


def _say_waiting(job: dict[str, Any]) -> None:
    if job["status"] == "queued":
        ref, how = one_line(job["ref"]), "again" if _node_counts(job) else "and has not begun"
        note(f"-- {ref} waits {how}: `shoal why {ref}` says for what")


def _say_silent(job: dict[str, Any], rank: int | None, attempt: int | None) -> None:
    """That there is no output, of what was asked for."""
    if job["status"] == "queued" and attempt is None:
        return
    attempts = job.get("attempts") or []
    is_over = job["status"] in ENDED or (attempt is not None and attempt < len(attempts))
    who = "it" if rank is None else f"rank {rank}"
    which = "" if attempt is None else f" in attempt {attempt}"
    # A log that was cleaned away, or that a backup did not have, reads as one that never had a line.
    said = (
        f"{who} printed nothing{which}, or its log is no longer here" if is_over else f"no output yet{which}"
    )
    note(f"-- {one_line(job['ref'])}: {said}")


def _say_earlier(job: dict[str, Any]) -> None:
    """Only the newest attempt is shown: say which others there are."""
    ref, attempts = one_line(job["ref"]), job.get("attempts") or []
    earlier = [attempt["epoch"] for attempt in attempts[:-1] if attempt["nodes"]]
    if earlier:
        before = f"there is one before; `shoal logs {ref} --attempt {earlier[-1]}` shows it"
        if len(earlier) > 1:
            before = (
                f"there are {len(earlier)} before; `shoal logs {ref} --attempt {earlier[-1]}` shows the last"
            )
        note(f"-- this is attempt {attempts[-1]['epoch']}; {before}")


def followed(
    shoal: Connection, job_id: str, ref: str, *, rank: int | None = None, tail: int | None = None
) -> Iterator[StreamEvent]:
    """What happens to a job; a server that goes, and one that stays away, are told beside it."""

    def tell(reach: Reach) -> None:
        url, wait_s = one_line(shoal.transport.endpoint.url), f"{shoal.patience_s:g}"
        gone = f"-- no answer from {url}; the job runs on; trying again for {wait_s} s"
        note(f"-- {url} answers again" if reach == "back" else gone)

    try:
        yield from shoal.follow_logs(job_id, rank=rank, tail=tail, on_change=tell)
    except ServerUnreachable as error:
        raise ServerUnreachable(
            error.message, hint=f"{error.hint}; `shoal logs -f {ref}` follows the job again"
        ) from error


def print_stream(events: Iterable[StreamEvent], *, timestamps: bool, json: bool) -> dict[str, Any]:
    """Print lines as they come and return what the `end` event said."""
    has_peers = False
    for event in events:
        if event.kind == "attempt":
            has_peers = len(event.data.get("nodes") or ()) > 1
        if event.kind == "line":
            print_line(event.data, timestamps=timestamps, json=json, has_peers=has_peers)
        elif json:
            print_json_line({"event": event.kind, **event.data})
        elif event.kind == "attempt":
            note(attempt_text(event.data))
        elif event.kind == "placed":
            note(placed_text(event.data))
        elif event.kind == "again":
            note(again_text(event.data))
        if event.kind == "end":
            return dict(event.data)
    return {}


def placed_text(data: dict[str, Any]) -> str:
    """Of one that its cluster lets wait, in that one's words."""
    which = "" if data.get("epoch") == 1 else f"attempt {data.get('epoch')} "
    waits = [one_line(told) for told in data.get("waits") or ()]
    more = f" and {len(waits) - 1} more" if len(waits) > 1 else ""
    return f"-- {which}placed on {_shown_nodes(data)}, waits there: {''.join(waits[:1])}{more}"


def _shown_nodes(data: dict[str, Any]) -> str:
    nodes = [one_line(name) for name in data.get("nodes") or ()]
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def attempt_text(data: dict[str, Any]) -> str:
    shown = _shown_nodes(data)
    word = "started" if data.get("epoch") == 1 else f"attempt {data.get('epoch')} started"
    return f"-- {word} on {shown}" if shown else f"-- {word}"


def again_text(data: dict[str, Any]) -> str:
    """How an attempt ended that another one follows, and when that comes."""
    told = f"-- attempt {data.get('epoch')} {ending_of(data)}"
    wait_s = data.get("again_in_s")
    return f"{told}; again in {wait_s:.0f} s" if wait_s and wait_s >= 1 else told


def ending_of(attempt: dict[str, Any]) -> str:
    """`failed: rank 0 exited with code 3`: how an attempt ended, on one line."""
    reason = str(attempt.get("reason") or "ended")
    word = ENDINGS.get(reason, reason.replace("_", " "))
    because = next(iter(lines_of(attempt.get("message") or "")), "")
    if not because and attempt.get("exit_code"):
        because = f"exit code {attempt['exit_code']}"
    if because.startswith(word):
        return because  # `gave way to ...` says it already
    return f"{word}: {because}" if because else word


def print_line(line: dict[str, Any], *, timestamps: bool, json: bool, has_peers: bool) -> None:
    """After its rank. What is no rank's, of its node where there are others."""
    if json:
        print_json_line(line)
        return
    when = f"{clock_text(line['at'])} " if timestamps else ""
    who = "setup" if line["stream"] == "s" else "shoal"
    if line.get("rank") is not None:
        who = str(line["rank"])
    elif has_peers:
        who += f" {one_line(line['node'])}"
    print(f"{when}[{who}] {log_text(line.get('text') or '')}", flush=True)


def clock_text(at: float) -> str:
    """Time of day in UTC with milliseconds."""
    return f"{utc(at, '%H:%M:%S')}.{int(at * 1000) % 1000:03d}Z"
