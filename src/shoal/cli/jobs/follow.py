"""Follow a job or an array to its end and return its exit code."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from shoal.cli.jobs.logs import follow_stream, print_stream
from shoal.cli.jobs.why import explanation_lines as why_lines
from shoal.cli.output import note, print_json, print_json_line
from shoal.cli.text import clean_lines, one_line, written_files_text
from shoal.client.connection import Connection
from shoal.client.handles import ENDED, ArrayHandle, JobHandle

PATIENCE_S = 1.0
"""If a job waits longer than this, the reason is printed."""
POLL_S = 0.05
ARRAY_POLL_S = 1.0
INTERRUPTED = 130
MAX_FAILURES = 10
"""At most this many failed elements of an array are named."""


def follow_job(shoal: Connection, job: JobHandle, *, json: bool) -> int:
    """Print the job's output until it ends and return its exit code. Ctrl-C detaches from the job."""
    ref = one_line(job.ref)
    try:
        note(f"-- {ref} submitted")
        if json:
            behind = {"left_behind": job.left_behind} if job.left_behind else {}
            print_json_line({"event": "submitted", "ref": job.ref, "job_id": job.job_id, **behind})
        _explain_wait(shoal, job)
        end = print_stream(follow_stream(shoal, job.job_id, ref), timestamps=False, json=json)
    except KeyboardInterrupt:
        note(
            f"\ndetached; {ref} keeps running: `shoal logs -f {ref}` follows it, `shoal stop {ref}` stops it"
        )
        return INTERRUPTED
    for line in end_lines(f"{ref} {end.get('status')}", end.get("because")):
        note(line)
    if end.get("ranks_without_group"):
        copies = "they may be copies of one program; if that is intended, write `world: any`"
        note(f"   its {end['ranks_without_group']} ranks formed no process group that Shoal saw: {copies}")
    if end.get("written"):
        note(f"   {written_files_text(end['written'], end['written'].get('checkpoint'))}")
    return exit_code(end)


def end_lines(subject: str, because: object) -> list[str]:
    """Return the end as a sentence, with the last output of the failed rank on lines of its own."""
    reason, *last_words = clean_lines(because or "") or [""]
    return [
        f"-- {subject}: {reason}" if reason else f"-- {subject}",
        *(f"     {line}" for line in last_words),
    ]


def _explain_wait(shoal: Connection, job: JobHandle) -> None:
    """Print why the job does not start, unless it starts within `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while job.refresh().status == "queued":
        if time.monotonic() > deadline:
            for line in why_lines(shoal.why(job.job_id)):
                note(f"-- {line}")
            return
        time.sleep(POLL_S)


def exit_code(end: dict[str, Any]) -> int:
    """Return the job's own exit code, or 1 if it failed without one."""
    if end.get("status") == "succeeded":
        return 0
    code = end.get("exit_code")
    return int(code) & 255 if isinstance(code, int) and code & 255 else 1


def follow_array(array: ArrayHandle, *, json: bool) -> int:
    """Print progress until every element has ended. Return 0 if all succeeded. Ctrl-C detaches."""
    name = one_line(array.jobs[0].name)
    first = array.jobs[0]
    look = f"`shoal logs '{name}[{first.data['array']['index']}]'` prints the output of one"
    note(f"-- {name}: {array.count} jobs submitted, from {one_line(first.ref)}; {look}")
    shown = ""
    try:
        while True:
            jobs = array.all()
            line = progress_text(jobs, array.count)
            if line != shown:
                _progress(f"-- {line}")
            shown = line
            if jobs and all(job.is_ended for job in jobs):
                break
            time.sleep(ARRAY_POLL_S)
    except KeyboardInterrupt:
        array_id = one_line(array.array_id)
        look = f"`shoal queue --name {name}` shows it"
        note(f"\ndetached; {name} keeps running: {look}, `shoal stop {array_id}` stops it")
        return INTERRUPTED
    if sys.stderr.isatty():
        note("")
    if json:
        print_json([job.data for job in jobs])
    unwell = [job for job in jobs if job.status != "succeeded"]
    for line in failure_lines(name, unwell):
        note(line)
    return 1 if unwell else 0


def progress_text(jobs: list[JobHandle], count: int) -> str:
    """Return `3 of 6 done, 1 failed, 2 running`. Queued elements are not listed."""
    counts = Counter(job.status for job in jobs)
    done = sum(counts[status] for status in ENDED)
    others = [s for s in ("failed", "cancelled", "running", "starting", "stopping") if counts[s]]
    return ", ".join([f"{done} of {count} done", *(f"{counts[status]} {status}" for status in others)])


def failure_lines(name: str, unwell: list[JobHandle]) -> list[str]:
    """List elements that did not succeed: the first with its last output and its log command, then others."""
    if not unwell:
        return []
    lines: list[str] = []
    for job in unwell[:MAX_FAILURES]:
        element = f"{name}[{job.data['array']['index']}] ({one_line(job.ref)}) {job.status}"
        end = end_lines(element, job.because)
        lines += [*end, f"     its output: `shoal logs {one_line(job.ref)}`"] if not lines else end[:1]
    more = len(unwell) - MAX_FAILURES
    if more > 0:
        lines.append(f"-- and {more} more: `shoal queue --all --name {name}`")
    return lines


def _progress(text: str) -> None:
    """Rewrite one line on a terminal; elsewhere print a line for each change."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        note(text)
