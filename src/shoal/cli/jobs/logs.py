"""`shoal logs`: a job's output with the rank that wrote it. `--follow` continues through retries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRef, JsonFlag, connect, resolve_job
from shoal.cli.output import note, print_json_line
from shoal.cli.text import clean_lines, log_text, one_line, utc
from shoal.client.connection import Connection
from shoal.client.handles import ENDED
from shoal.client.stream import ServerReach, StreamEvent
from shoal.errors import ServerUnreachable, SpecError

ENDINGS = {
    **dict.fromkeys(("exit", "signal", "oom", "setup", "world", "time_limit"), "failed"),
    "fenced": "lost",
    "preempted": "gave way",
}
"""How people read an `EndReason`; the others read well as they are."""


def logs(
    job: JobRef,
    *,
    follow: Annotated[
        bool, Parameter(name=["--follow", "-f"], negative="", help="Print new output until the job ends.")
    ] = False,
    rank: Annotated[int | None, Parameter(name=["--rank", "-r"], help="Only this rank.")] = None,
    tail: Annotated[int | None, Parameter(name=["--tail", "-n"], help="Only the last lines.")] = None,
    attempt: Annotated[int | None, Parameter(help="An earlier attempt; the first is 1.")] = None,
    timestamps: Annotated[
        bool, Parameter(name=["--timestamps", "-t"], negative="", help="Print the time of each line, in UTC.")
    ] = False,
    stacks: Annotated[
        bool, Parameter(name="--stacks", negative="", help="The stacks of its ranks when they hung.")
    ] = False,
    json: JsonFlag = False,
) -> int:
    """Print a job's output, each line after the rank that wrote it. Escape sequences are removed.

    The name of an array stands for its newest element, the name of a service
    for a live replica of the release that serves.
    """
    with connect() as shoal:
        ref, job = job, resolve_job(shoal, job)
        if follow and stacks:
            raise SpecError("`--stacks` prints what was saved when ranks hung; it cannot be followed")
        data = shoal.job_data(job)
        check_rank(data, rank)
        if attempt is None and not stacks:
            _say_earlier(data)
        if follow and attempt is None:
            _say_waiting(data)
            stream = follow_stream(shoal, job, one_line(ref), rank=rank, tail=tail)
            print_stream(stream, timestamps=timestamps, json=json)
            return 0
        is_empty, has_peers = True, max(_node_counts(data), default=1) > 1
        for line in shoal.logs(job, rank=rank, attempt=attempt, tail=tail, stacks=stacks):
            print_line(line, timestamps=timestamps, json=json, has_peers=has_peers)
            is_empty = False
        if is_empty and stacks:
            note(no_stacks_text(one_line(ref), rank, attempt))
        elif is_empty and tail != 0:
            _say_waiting(data)
            _say_silent(data, rank, attempt)
    return 0


def no_stacks_text(ref: str, rank: int | None, attempt: int | None) -> str:
    """Say that there are no stacks for this rank and attempt; others may have some."""
    rank_text = "" if rank is None else f" of rank {rank}"
    which = "its newest attempt" if attempt is None else f"attempt {attempt}"
    other = "" if attempt is not None else "; `--attempt N` shows an earlier one's"
    return f"-- {ref}: no stacks{rank_text} in {which}; they are saved when ranks hang{other}"


def check_rank(job: dict[str, Any], rank: int | None) -> None:
    """Raise `SpecError` if the job does not have this rank."""
    request, ref = job.get("request") or {}, one_line(job["ref"])
    nodes = max(_node_counts(job), default=request.get("max_nodes") or 1)
    ranks = nodes * (request.get("ranks_per_node") or 1)
    if rank is not None and not 0 <= rank < ranks:
        has = f"{ranks} ranks, 0 to {ranks - 1}" if ranks > 1 else "one rank, 0"
        raise SpecError(f"`--rank {rank}`: job {ref} has {has}", hint=f"`shoal logs {ref}` shows all of them")


def _node_counts(job: dict[str, Any]) -> list[int]:
    """Return the number of nodes of each attempt that was placed."""
    return [len(attempt["nodes"]) for attempt in job.get("attempts") or () if attempt["nodes"]]


def _say_waiting(job: dict[str, Any]) -> None:
    if job["status"] == "queued":
        ref, how = one_line(job["ref"]), "waits again" if _node_counts(job) else "waits and has not started"
        note(f"-- {ref} {how}: `shoal why {ref}` prints the reason")


def _say_silent(job: dict[str, Any], rank: int | None, attempt: int | None) -> None:
    """Print that this rank or attempt has no output."""
    if job["status"] == "queued" and attempt is None:
        return
    attempts = job.get("attempts") or []
    is_over = job["status"] in ENDED or (attempt is not None and attempt < len(attempts))
    subject = "it" if rank is None else f"rank {rank}"
    which = "" if attempt is None else f" in attempt {attempt}"
    # A log that was cleaned up, or that a backup left out, looks like one that never had a line.
    text = (
        f"{subject} printed nothing{which}, or its log is no longer here"
        if is_over
        else f"no output yet{which}"
    )
    note(f"-- {one_line(job['ref'])}: {text}")


def _say_earlier(job: dict[str, Any]) -> None:
    """Print that there are earlier attempts, because only the newest is shown."""
    ref, attempts = one_line(job["ref"]), job.get("attempts") or []
    earlier = [attempt["epoch"] for attempt in attempts[:-1] if attempt["nodes"]]
    if earlier:
        before = f"there is one before; `shoal logs {ref} --attempt {earlier[-1]}` shows it"
        if len(earlier) > 1:
            before = (
                f"there are {len(earlier)} before; `shoal logs {ref} --attempt {earlier[-1]}` shows the last"
            )
        note(f"-- this is attempt {attempts[-1]['epoch']}; {before}")


def follow_stream(
    shoal: Connection, job_id: str, ref: str, *, rank: int | None = None, tail: int | None = None
) -> Iterator[StreamEvent]:
    """Yield what happens to a job. Print a note when the server stops answering and when it answers again."""

    def report(reach: ServerReach) -> None:
        url, wait_s = one_line(shoal.transport.endpoint.url), f"{shoal.patience_s:g}"
        gone = f"-- no answer from {url}; the job keeps running; trying again for {wait_s} s"
        note(f"-- {url} answers again" if reach == "back" else gone)

    try:
        yield from shoal.follow_logs(job_id, rank=rank, tail=tail, on_change=report)
    except ServerUnreachable as error:
        raise ServerUnreachable(
            error.message, hint=f"{error.hint}; `shoal logs -f {ref}` follows the job again"
        ) from error


def print_stream(events: Iterable[StreamEvent], *, timestamps: bool, json: bool) -> dict[str, Any]:
    """Print lines as they come and return the data of the `end` event."""
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
    """Say where an attempt was placed and that its cluster lets it wait, with the cluster's reason."""
    which = "" if data.get("epoch") == 1 else f"attempt {data.get('epoch')} "
    waits = [one_line(wait) for wait in data.get("waits") or ()]
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
    """Say how an attempt ended that will be retried, and when."""
    text = f"-- attempt {data.get('epoch')} {ending_text(data)}"
    wait_s = data.get("again_in_s")
    return f"{text}; again in {wait_s:.0f} s" if wait_s and wait_s >= 1 else text


def ending_text(attempt: dict[str, Any]) -> str:
    """Return how an attempt ended, in one line: `failed: rank 0 exited with code 3`."""
    reason = str(attempt.get("reason") or "ended")
    word = ENDINGS.get(reason, reason.replace("_", " "))
    because = next(iter(clean_lines(attempt.get("message") or "")), "")
    if not because and attempt.get("exit_code"):
        because = f"exit code {attempt['exit_code']}"
    if because.startswith(word):
        return because  # `gave way to ...` begins with the word
    return f"{word}: {because}" if because else word


def print_line(line: dict[str, Any], *, timestamps: bool, json: bool, has_peers: bool) -> None:
    """Print a line after its rank. A line of no rank names its node if there are several."""
    if json:
        print_json_line(line)
        return
    when = f"{clock_text(line['at'])} " if timestamps else ""
    source = "setup" if line["stream"] == "s" else "shoal"
    if line.get("rank") is not None:
        source = str(line["rank"])
    elif has_peers:
        source += f" {one_line(line['node'])}"
    print(f"{when}[{source}] {log_text(line.get('text') or '')}", flush=True)


def clock_text(at: float) -> str:
    """Return the time of day in UTC, with milliseconds."""
    return f"{utc(at, '%H:%M:%S')}.{int(at * 1000) % 1000:03d}Z"
