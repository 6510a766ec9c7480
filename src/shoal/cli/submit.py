"""Submit what was typed or read, and follow it or leave it: what all forms of `shoal run` share."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.cli.text import one_line
from shoal.client.connection import Connection
from shoal.client.credentials import LOCAL, Credentials, read_server_file
from shoal.client.handles import ArrayHandle, JobHandle
from shoal.errors import SpecError
from shoal.home import holder, home_from_env

HERE = "."
"""The workdir where none is named: what `spec` says, which is not loaded here."""


def submit_flags(flags: dict[str, Any], program: tuple[str, ...], *, detach: bool, json: bool) -> int:
    """Send the flags as they were typed: the server reads them, and says what is wrong with them."""
    typed = {name: "true" if value is True else value for name, value in flags.items()}
    told: dict[str, Any] = {**typed, "env": tuple(filled(pair) for pair in flags.get("env", ()))}
    if not told["env"]:
        del told["env"]
    if not program:
        raise SpecError("nothing to run", hint="`shoal run -- python train.py`, or `shoal run job.yaml`")
    told["run"] = command_line(program)
    if not is_served():
        # Slow anyway: look for mistakes before a control plane is started for them.
        from shoal.spec import spec_from_flags

        spec_from_flags(**told)
        start_server()
    workdir = str(told.get("workdir", HERE))
    from shoal.cli.show import slow_work

    with Connection() as shoal:
        with slow_work() as shoal.on_progress:
            submitted = shoal.send(
                {"flags": told},
                workdir=Path.cwd() / workdir if workdir else None,
                secrets=told.get("secrets", ()),
            )
        remark(told["run"], submitted, dict(pair.split("=", 1) for pair in told.get("env", ())))
        return follow(shoal, submitted, detach=detach, json=json)


def remark(run: str, submitted: JobHandle | ArrayHandle, own_env: Mapping[str, str]) -> None:
    """Say what its owner may not expect of a job that was just accepted."""
    from shoal.cli.remarks import about, about_files
    from shoal.cli.show import note

    job = submitted if isinstance(submitted, JobHandle) else submitted.jobs[0]
    home = None if is_elsewhere(home_from_env()) else home_from_env()
    for text in (*about(run, job.data, os.environ, home, own_env), *about_files(job.left_behind)):
        note(text)


def command_line(program: tuple[str, ...]) -> str:
    """What follows `--` as a line for a shell: one word is that line already, several are quoted."""
    return program[0] if len(program) == 1 else shlex.join(program)


def filled(pair: str) -> str:
    """`NAME` alone takes the value it has here."""
    if "=" in pair:
        return pair
    if pair not in os.environ:
        raise SpecError(f"`--env {one_line(pair)}`: not set here", hint=f"`--env {one_line(pair)}=VALUE`")
    return f"{pair}={os.environ[pair]}"


def is_served() -> bool:
    """Whether there is a server to talk to, as far as this machine can tell: another's is taken on trust."""
    home = home_from_env()
    if is_elsewhere(home):
        return True
    return holder(home) is not None and read_server_file(home) is not None


def is_elsewhere(home: Path) -> bool:
    """Whether commands talk to another server than this home's."""
    return bool(os.environ.get("SHOAL_URL")) or (Credentials(home).load()["current"] or LOCAL) != LOCAL


def start_server() -> None:
    """Start this machine's control plane in the background and say so."""
    from shoal.cli import daemon
    from shoal.cli.show import note

    running = daemon.start()
    if not running.was_running:
        note(f"no control plane was running; started one at {running.url} (`shoal down` stops it)")
    if running.first_token:
        note(f"your admin token is saved in {Credentials(home_from_env()).path}")


def follow(shoal: Connection, submitted: JobHandle | ArrayHandle, *, detach: bool, json: bool) -> int:
    """To its end, or, detached, print its name."""
    if not detach:
        from shoal.cli.follow import follow_array, follow_job

        if isinstance(submitted, ArrayHandle):
            return follow_array(submitted, json=json)
        return follow_job(shoal, submitted, json=json)
    if json:
        _print_json(submitted)
    elif isinstance(submitted, ArrayHandle):
        first = one_line(submitted.jobs[0].ref)
        print(f"{one_line(submitted.array_id)} ({submitted.count} jobs from {first})")
    else:
        print(one_line(submitted.ref))
    return 0


def _print_json(submitted: JobHandle | ArrayHandle) -> None:
    from shoal.cli.show import print_json

    if isinstance(submitted, JobHandle):
        print_json({**submitted.data, **_left_behind(submitted)})
        return
    facts = {"ref": submitted.array_id, "array_id": submitted.array_id, "count": submitted.count}
    facts |= _left_behind(submitted.jobs[0])
    print_json({**facts, "jobs": [job.data for job in submitted.jobs]})


def _left_behind(job: JobHandle) -> dict[str, Any]:
    return {"left_behind": job.left_behind} if job.left_behind else {}
