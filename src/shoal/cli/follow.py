"""Follow a job or an array to its end, and leave with the exit code it had."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Any

from shoal.cli.logs import print_stream
from shoal.cli.show import note, print_json
from shoal.cli.text import one_line
from shoal.cli.why import lines as why_lines
from shoal.client.connection import Connection
from shoal.client.handles import ArrayHandle, JobHandle

PATIENCE_S = 1.0
"""A job that waits longer than this is explained."""
POLL_S = 0.05
ARRAY_POLL_S = 1.0
INTERRUPTED = 130


def follow_job(shoal: Connection, job: JobHandle, *, json: bool) -> int:
    """Print its output until it ends. Ctrl-C detaches: the job runs on."""
    ref = one_line(job.ref)
    try:
        note(f"-- {ref} submitted")
        _explain_wait(shoal, job)
        end = print_stream(shoal.follow_logs(job.job_id), timestamps=False, json=json)
    except KeyboardInterrupt:
        note(f"\ndetached; {ref} goes on: `shoal logs -f {ref}` follows it, `shoal stop {ref}` stops it")
        return INTERRUPTED
    because = f": {one_line(end['because'])}" if end.get("because") else ""
    note(f"-- {ref} {end.get('status')}{because}")
    return exit_code(end)


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
    name = one_line(array.array_id)
    note(f"-- {name}: {array.count} jobs submitted, from {one_line(array.jobs[0].ref)}")
    shown = ""
    try:
        while True:
            jobs = array.all()
            counts = Counter(job.status for job in jobs)
            line = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
            if line != shown:
                _progress(f"-- {line}")
            shown = line
            if jobs and all(job.is_ended for job in jobs):
                break
            time.sleep(ARRAY_POLL_S)
    except KeyboardInterrupt:
        note(f"\ndetached; the array goes on without you: `shoal queue`, `shoal stop --array {name}`")
        return INTERRUPTED
    if sys.stderr.isatty():
        note("")
    if json:
        print_json([job.data for job in jobs])
    for job in [job for job in jobs if job.status != "succeeded"][:10]:
        note(f"-- {one_line(job.ref)} {job.status}: {one_line(job.because)}")
    return 0 if all(job.status == "succeeded" for job in jobs) else 1


def _progress(text: str) -> None:
    """One line that is rewritten on a terminal, and a line for each change elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        note(text)
