"""`shoal stop` and `shoal retry`, and how a command waits for the end of stopped jobs.

A job whose supervisor is silent may take its whole fence to end, so the wait says for which jobs it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JobRefs, JsonFlag, connect
from shoal.cli.output import note, print_error, print_json
from shoal.cli.text import duration, joined_lines, one_line, utc
from shoal.client.connection import Connection
from shoal.client.handles import JobHandle, WaitTimeout
from shoal.errors import LimitReached, NotFound, ShoalError, SpecError


def stop(
    *jobs: JobRefs,
    array: Annotated[str | None, Parameter(help="Stop every element of this array (`arr_...`).")] = None,
    wait: Annotated[bool, Parameter(negative="", help="Return when the jobs have ended.")] = False,
    json: JsonFlag = False,
) -> int:
    """Stop jobs: SIGTERM, then after the job's `grace` SIGKILL for the whole process tree.

    The name of an array stops every element of it. The name of a service stops
    its replicas after they have answered the requests they have.
    """
    with connect() as shoal:
        if array:
            shoal.stop_array(array)
            if not json:
                print(f"array {one_line(array)}: asked to stop")
        elif not jobs:
            raise SpecError("no job named", hint="`shoal stop JOB`, or `shoal stop --array ARRAY`")
        served = {ref for ref in jobs if _is_service(shoal, ref)}
        ending = [shoal.services.stop(ref) for ref in sorted(served)]
        done, code = _act_on_each(shoal.stop_all, tuple(ref for ref in jobs if ref not in served))
        over = {job.job_id for job in done if job.is_ended}
        if wait:
            done = [job.wait() for job in done]
    if json:
        print_json([*ending, *(job.data for job in done)])
        return code
    for service in ending:
        print(f"{one_line(service['ref'])}: stopping; its replicas finish their requests")
    for job in done:
        print(stop_result_text(job) if job.job_id in over else f"{one_line(job.ref)}: {job.status}")
    return code


def _is_service(shoal: Connection, ref: str) -> bool:
    """Whether `ref` names a service. A job of the same name is usually its replica, so the service wins."""
    name = ref.rpartition("/")[2]
    is_job = name.isdigit() or ref.startswith(("job_", "arr_")) or name.endswith("]")
    if is_job or ref.startswith("svc_"):
        return not is_job
    with suppress(NotFound):  # a server version without services
        return bool(shoal.services.find(ref))
    return False


def stop_result_text(job: JobHandle) -> str:
    """Say how an ended job ended, and whether that was before the stop."""
    word = "cancelled" if job.status == "cancelled" else f"had ended already: {job.status}"
    because = joined_lines(job.because)
    return f"{one_line(job.ref)}: {word}" + (f" ({because})" if because else "")


def retry(*jobs: JobRefs, json: JsonFlag = False) -> int:
    """Queue a new attempt of jobs that have ended.

    The name of an array retries every element that failed or was cancelled.
    """
    if not jobs:
        raise SpecError("no job named", hint="`shoal retry JOB`")
    with connect() as shoal:
        done, code = _act_on_each(shoal.retry_all, jobs)
    if json:
        print_json([job.data for job in done])
        return code
    for job in done:
        print(f"{one_line(job.ref)}: {job.status}")
    return code


def _act_on_each(act: Callable[[str], list[JobHandle]], refs: tuple[str, ...]) -> tuple[list[JobHandle], int]:
    """Act on every job. If one fails, report it and go on with the others."""
    done: list[JobHandle] = []
    code = 0
    for ref in refs:
        try:
            done += act(ref)
        except ShoalError as error:
            if len(refs) == 1:
                raise
            print_error(error)
            code = code or error.exit_code
    return done, code


FIRST_WORD_S, NEXT_WORD_S = 2.0, 10.0
SHOWN = 3


def wait_for_ends(handles: Sequence[JobHandle]) -> list[str]:
    """Block until all have ended and return their refs. From time to time, print which have not ended."""
    due = time.monotonic() + FIRST_WORD_S
    for number, handle in enumerate(handles):
        while True:
            try:
                handle.wait(max(due - time.monotonic(), 0.0))
                break
            except WaitTimeout:
                _report_waiting(handles[number:])
                due = time.monotonic() + NEXT_WORD_S
            except LimitReached as busy:  # the server is busy: keep waiting
                note(f"-- {one_line(busy.message)}; asking again in {duration(NEXT_WORD_S)}")
                time.sleep(NEXT_WORD_S)
    return [handle.ref for handle in handles]


def _report_waiting(left: Sequence[JobHandle]) -> None:
    """Report the first `SHOWN` jobs: each costs two requests."""
    for handle in left[:SHOWN]:
        explanation: dict[str, Any] = {}
        with suppress(ShoalError):
            if handle.refresh().is_ended:
                continue
            explanation = handle.why().get("explanation") or {}
        note(f"-- {waiting_text(handle, explanation, time.time())}; Ctrl-C leaves it stopping")
    if len(left) > SHOWN:
        note(f"-- and for {len(left) - SHOWN} more, unless they have ended meanwhile")


def waiting_text(handle: JobHandle, explanation: dict[str, Any], now: float) -> str:
    """Say which job the command waits for and when that ends. `explanation`: why the job is in its state."""
    nodes = ", ".join(one_line(name) for name in handle.data.get("nodes") or ())
    subject = f"waiting for {one_line(handle.ref)}{f' on {nodes}' if nodes else ''}"
    facts = explanation.get("facts") or {}
    if explanation.get("why") == "unreachable" and facts.get("fence_left_s", 0.0) > 0.0:
        ends = utc(now + facts["fence_left_s"], "%H:%M")
        silence = f"silent for {duration(facts['silent_s'])}"
        return f"{subject} ({silence}; unless it answers, it counts as ended at about {ends} UTC)"
    return f"{subject} ({one_line(explanation.get('sentence') or handle.status)})"
