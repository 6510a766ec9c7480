"""Flags that several commands share, and the connection they all use."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import note
from shoal.cli.text import one_line
from shoal.client.connection import Connection

JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON for machines.")]
Because = Annotated[str, Parameter(name=["--because", "-m"], help="The reason, recorded with the event.")]
JobRef = Annotated[str, Parameter(help="`17`, `PROJECT/17`, `job_...`, a name (the newest) or `NAME[2]`.")]
JobRefs = Annotated[str, Parameter(help="Each `17`, `PROJECT/17`, `job_...`, a name or `NAME[2]`.")]


def connect() -> Connection:
    """Return a connection to the server that this user talks to. It sends nothing until the first call."""
    return Connection()


def resolve_job(shoal: Connection, ref: str) -> str:
    """Return the id of the job that `ref` names.

    For an array this is the newest element, for a service a replica, and a note says which.
    """
    if ref.startswith("job_"):
        return ref
    job, array_id = shoal.find(ref)
    if array_id is not None:
        size = (job.get("array") or {}).get("size")
        here = one_line(job["ref"])
        note(f"-- {one_line(ref)} is an array of {size}; this is its newest element, {here}")
    place = job.get("replica")
    if place and ref.rpartition("/")[2] == place["service"]:
        which = f"{one_line(job['ref'])}, a replica of release {place['release']} ({job['status']})"
        note(f"-- {one_line(ref)} is a service; this is {which}")
    return str(job["job_id"])
