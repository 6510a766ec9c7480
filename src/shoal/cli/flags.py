"""Flags that several commands share, and the connection they all use."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from shoal.client.connection import Connection

JsonFlag = Annotated[bool, Parameter(name="--json", negative="", help="Print JSON for machines.")]
Because = Annotated[str, Parameter(name=["--because", "-m"], help="The reason, for whoever asks later.")]
JobRef = Annotated[str, Parameter(help="`17`, `PROJECT/17`, `job_...` or a name (its newest job).")]
JobRefs = Annotated[str, Parameter(help="Each `17`, `PROJECT/17`, `job_...` or a name.")]


def connect() -> Connection:
    """The server this user talks to. Nothing is sent yet."""
    return Connection()
