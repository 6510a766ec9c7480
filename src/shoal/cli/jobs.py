"""`shoal stop` and `shoal retry`: what one does to jobs that exist."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.flags import JobRefs, JsonFlag, connect
from shoal.cli.show import print_error, print_json
from shoal.cli.text import in_one_breath, one_line
from shoal.client.connection import Connection
from shoal.client.handles import JobHandle
from shoal.errors import NotFound, ShoalError, SpecError


def stop(
    *jobs: JobRefs,
    array: Annotated[str | None, Parameter(help="Stop every element of this array (`arr_...`).")] = None,
    wait: Annotated[bool, Parameter(negative="", help="Return when they have ended.")] = False,
    json: JsonFlag = False,
) -> int:
    """Stop jobs: SIGTERM, then after the job's `grace` the whole process tree is killed.

    The name of an array stops every element of it, the name of a service all
    of its replicas when they have finished what they have.
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
        done, code = _each(shoal.stop_all, tuple(ref for ref in jobs if ref not in served))
        over = {job.job_id for job in done if job.is_ended}
        if wait:
            done = [job.wait() for job in done]
    if json:
        print_json([*ending, *(job.data for job in done)])
        return code
    for service in ending:
        print(f"{one_line(service['ref'])}: stopping; its replicas finish what they have")
    for job in done:
        print(after_stop(job) if job.job_id in over else f"{one_line(job.ref)}: {job.status}")
    return code


def _is_service(shoal: Connection, ref: str) -> bool:
    """A job of the same name is a replica, as a rule: it is the service that is meant."""
    name = ref.rpartition("/")[2]
    is_job = name.isdigit() or ref.startswith(("job_", "arr_")) or name.endswith("]")
    if is_job or ref.startswith("svc_"):
        return not is_job
    with suppress(NotFound):  # a server without services
        return bool(shoal.services.named(ref))
    return False


def after_stop(job: JobHandle) -> str:
    """One that has ended: how, and whether that was before anybody could stop it."""
    word = "cancelled" if job.status == "cancelled" else f"had ended already: {job.status}"
    because = in_one_breath(job.because)
    return f"{one_line(job.ref)}: {word}" + (f" ({because})" if because else "")


def retry(*jobs: JobRefs, json: JsonFlag = False) -> int:
    """Queue a new attempt of jobs that have ended.

    The name of an array retries every element that failed or was cancelled.
    """
    if not jobs:
        raise SpecError("no job named", hint="`shoal retry JOB`")
    with connect() as shoal:
        done, code = _each(shoal.retry_all, jobs)
    if json:
        print_json([job.data for job in done])
        return code
    for job in done:
        print(f"{one_line(job.ref)}: {job.status}")
    return code


def _each(act: Callable[[str], list[JobHandle]], refs: tuple[str, ...]) -> tuple[list[JobHandle], int]:
    """Act on every job; one that fails is reported and does not stop the others."""
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
