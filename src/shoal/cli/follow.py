"""Follow a job or an array to its end, and leave with the exit code it had."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from shoal.cli.logs import followed, print_stream
from shoal.cli.show import note, print_json, print_json_line
from shoal.cli.text import lines_of, one_line, told_written
from shoal.cli.why import lines as why_lines
from shoal.client.connection import Connection
from shoal.client.handles import ENDED, ArrayHandle, JobHandle

PATIENCE_S = 1.0
"""A job that waits longer than this is explained."""
POLL_S = 0.05
ARRAY_POLL_S = 1.0
INTERRUPTED = 130
MAX_FAILURES = 10
"""Elements of an array that are named one by one."""


def follow_job(shoal: Connection, job: JobHandle, *, json: bool) -> int:
    """Print its output until it ends. Ctrl-C detaches: the job runs on."""
    ref = one_line(job.ref)
    try:
        note(f"-- {ref} submitted")
        if json:
            behind = {"left_behind": job.left_behind} if job.left_behind else {}
            print_json_line({"event": "submitted", "ref": job.ref, "job_id": job.job_id, **behind})
        _explain_wait(shoal, job)
        end = print_stream(followed(shoal, job.job_id, ref), timestamps=False, json=json)
    except KeyboardInterrupt:
        note(f"\ndetached; {ref} goes on: `shoal logs -f {ref}` follows it, `shoal stop {ref}` stops it")
        return INTERRUPTED
    for line in how_it_ended(f"{ref} {end.get('status')}", end.get("because")):
        note(line)
    if end.get("ranks_without_group"):
        copies = "they may be copies of one program; if that is meant, say `world: any`"
        note(f"   its {end['ranks_without_group']} ranks formed no process group that Shoal saw: {copies}")
    if end.get("written"):
        note(f"   {told_written(end['written'], end['written'].get('checkpoint'))}")
    return exit_code(end)


def how_it_ended(what: str, because: object) -> list[str]:
    """A sentence, and the last words of whoever failed on lines of their own."""
    reason, *last_words = lines_of(because or "") or [""]
    return [f"-- {what}: {reason}" if reason else f"-- {what}", *(f"     {line}" for line in last_words)]


def _explain_wait(shoal: Connection, job: JobHandle) -> None:
    """Say why it does not start, if it does not start at once."""
    deadline = time.monotonic() + PATIENCE_S
    while job.refresh().status == "queued":
        if time.monotonic() > deadline:
            for line in why_lines(shoal.why(job.job_id)):
                note(f"-- {line}")
            return
        time.sleep(POLL_S)


def exit_code(end: dict[str, Any]) -> int:
    """The job's own code; 1 for an end without one that is not a success."""
    if end.get("status") == "succeeded":
        return 0
    code = end.get("exit_code")
    return int(code) & 255 if isinstance(code, int) and code & 255 else 1


def follow_array(array: ArrayHandle, *, json: bool) -> int:
    """Print progress until every element has ended; 0 if all succeeded. Ctrl-C detaches."""
    name = one_line(array.jobs[0].name)
    first = array.jobs[0]
    look = f"`shoal logs '{name}[{first.data['array']['index']}]'` shows the output of one"
    note(f"-- {name}: {array.count} jobs submitted, from {one_line(first.ref)}; {look}")
    shown = ""
    try:
        while True:
            jobs = array.all()
            line = progress_of(jobs, array.count)
            if line != shown:
                _progress(f"-- {line}")
            shown = line
            if jobs and all(job.is_ended for job in jobs):
                break
            time.sleep(ARRAY_POLL_S)
    except KeyboardInterrupt:
        array_id = one_line(array.array_id)
        look = f"`shoal queue --name {name}` shows it"
        note(f"\ndetached; {name} goes on: {look}, `shoal stop {array_id}` stops it")
        return INTERRUPTED
    if sys.stderr.isatty():
        note("")
    if json:
        print_json([job.data for job in jobs])
    unwell = [job for job in jobs if job.status != "succeeded"]
    for line in failures(name, unwell):
        note(line)
    return 1 if unwell else 0


def progress_of(jobs: list[JobHandle], count: int) -> str:
    """`3 of 6 done, 1 failed, 2 running`: what is not done waits, unless it is said."""
    counts = Counter(job.status for job in jobs)
    done = sum(counts[status] for status in ENDED)
    others = [s for s in ("failed", "cancelled", "running", "starting", "stopping") if counts[s]]
    return ", ".join([f"{done} of {count} done", *(f"{counts[status]} {status}" for status in others)])


def failures(name: str, unwell: list[JobHandle]) -> list[str]:
    """Elements that did not succeed: the first with its last words and how to see its output, then others."""
    if not unwell:
        return []
    found: list[str] = []
    for job in unwell[:MAX_FAILURES]:
        element = f"{name}[{job.data['array']['index']}] ({one_line(job.ref)}) {job.status}"
        told = how_it_ended(element, job.because)
        found += [*told, f"     its output: `shoal logs {one_line(job.ref)}`"] if not found else told[:1]
    more = len(unwell) - MAX_FAILURES
    if more > 0:
        found.append(f"-- and {more} more: `shoal queue --all --name {name}`")
    return found


def _progress(text: str) -> None:
    """One line that is rewritten on a terminal, and a line for each change elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        note(text)
