"""Submit a job, print notes about it, and follow or detach: the part that all forms of `shoal run` share.

A note is a fact about the submitted job that its owner may not expect.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.cli.text import one_line, size
from shoal.client.connection import Connection
from shoal.client.credentials import LOCAL, Credentials, read_server_file
from shoal.client.handles import ArrayHandle, JobHandle
from shoal.errors import SpecError
from shoal.home import home_from_env, pid_holding

HERE = "."
"""The default workdir, as `spec` has it; `spec` is not loaded here."""


def submit_flags(flags: dict[str, Any], program: tuple[str, ...], *, detach: bool, json: bool) -> int:
    """Send the flags as they were typed. The server parses them and reports mistakes."""
    typed = {name: "true" if value is True else value for name, value in flags.items()}
    fields: dict[str, Any] = {**typed, "env": tuple(resolve_env(pair) for pair in flags.get("env", ()))}
    if not fields["env"]:
        del fields["env"]
    if not program:
        raise SpecError("nothing to run", hint="`shoal run -- python train.py`, or `shoal run job.yaml`")
    fields["run"] = command_line(program)
    if not is_served():
        # Starting a server is slow anyway, so look for mistakes first.
        from shoal.spec import spec_from_flags

        spec_from_flags(**fields)
        start_server()
    workdir = str(fields.get("workdir", HERE))
    from shoal.cli.output import slow_work

    with Connection() as shoal:
        with slow_work() as shoal.on_progress:
            submitted = shoal.send(
                {"flags": fields},
                workdir=Path.cwd() / workdir if workdir else None,
                secrets=fields.get("secrets", ()),
            )
        print_notes(fields["run"], submitted, dict(pair.split("=", 1) for pair in fields.get("env", ())))
        return follow(shoal, submitted, detach=detach, json=json)


def print_notes(run: str, submitted: JobHandle | ArrayHandle, own_env: Mapping[str, str]) -> None:
    """Print what the owner may not expect of a job that was just accepted."""
    from shoal.cli.output import note

    job = submitted if isinstance(submitted, JobHandle) else submitted.jobs[0]
    home = None if is_elsewhere(home_from_env()) else home_from_env()
    for text in (*job_notes(run, job.data, os.environ, home, own_env), *file_notes(job.left_behind)):
        note(text)


def command_line(program: tuple[str, ...]) -> str:
    """Return the program as a line for a shell: a single word is that line already, several are quoted."""
    return program[0] if len(program) == 1 else shlex.join(program)


def resolve_env(pair: str) -> str:
    """Return NAME=VALUE; `NAME` alone takes its value from this environment."""
    if "=" in pair:
        return pair
    if pair not in os.environ:
        raise SpecError(f"`--env {one_line(pair)}`: not set here", hint=f"`--env {one_line(pair)}=VALUE`")
    return f"{pair}={os.environ[pair]}"


def is_served() -> bool:
    """Whether there is a server to talk to. A server on another machine is assumed to run."""
    home = home_from_env()
    if is_elsewhere(home):
        return True
    return pid_holding(home) is not None and read_server_file(home) is not None


def is_elsewhere(home: Path) -> bool:
    """Whether commands talk to a server other than this home's."""
    return bool(os.environ.get("SHOAL_URL")) or (Credentials(home).load()["current"] or LOCAL) != LOCAL


def start_server() -> None:
    """Start this machine's control plane in the background and print its address."""
    from shoal.cli.control_plane import daemon
    from shoal.cli.output import note

    running = daemon.start()
    if not running.was_running:
        note(f"no control plane was running; started one at {running.url} (`shoal down` stops it)")
    if running.first_token:
        note(f"your admin token is saved in {Credentials(home_from_env()).path}")


def follow(shoal: Connection, submitted: JobHandle | ArrayHandle, *, detach: bool, json: bool) -> int:
    """Follow the job to its end; with `detach`, print its name."""
    if not detach:
        from shoal.cli.jobs.follow import follow_array, follow_job

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
    from shoal.cli.output import print_json

    if isinstance(submitted, JobHandle):
        print_json({**submitted.data, **_left_behind(submitted)})
        return
    facts = {"ref": submitted.array_id, "array_id": submitted.array_id, "count": submitted.count}
    facts |= _left_behind(submitted.jobs[0])
    print_json({**facts, "jobs": [job.data for job in submitted.jobs]})


def _left_behind(job: JobHandle) -> dict[str, Any]:
    return {"left_behind": job.left_behind} if job.left_behind else {}


NAMED = 2
MAX_SNAPSHOT = 256 << 20
NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*[0-9]")
LAUNCHERS = ("mpirun", "mpiexec")
"""Programs that start processes themselves if named by a path. Launchers in Python notice their rank."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def job_notes(
    run: str, job: Mapping[str, Any], env: Mapping[str, str], home: Path | None, own_env: Mapping[str, str]
) -> Iterator[str]:
    """Yield notes on a job that was just submitted.

    `env`: the submitter's environment. `own_env`: the job's. `home`: the server's, if on this machine.
    """
    ranks = (job.get("request") or {}).get("ranks_per_node") or 1
    launcher = launcher_of(run)
    if launcher and ranks > 1:
        yield (
            f"note: `{launcher}` starts processes itself, and {ranks} copies of it run on each node, one per "
            "rank; write its name without the path, or start one with `--ranks-per-node 1`"
        )
    if home is not None and sys.stderr.isatty() and "PATH" not in own_env:
        place = unseen_environment(env, home)
        if place is not None and place not in run:
            yield (
                f"note: the activated environment {one_line(place)} is not on the PATH of jobs, which is "
                f"the PATH of `shoal up`; add `--env PATH={one_line(place)}/bin:/usr/bin:/bin` to use it in "
                "this job"
            )


def file_notes(behind: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on files that were not copied to the job. `behind`: the submission's report on them."""
    count, names = behind.get("num_files") or 0, [one_line(name) for name in behind.get("files") or ()]
    for pattern in behind.get("useless") or ():
        meant = f"; to keep a job off a node write `--exclude-node {one_line(pattern)}`"
        sentence = f"note: `exclude`: `{one_line(pattern)}` matches no file"
        yield sentence + (meant if NODE.fullmatch(pattern) else "")
    if not count or not names:
        return
    more = "more than " if behind.get("is_more") else ""
    files = "1 file, " if count == 1 and not more else f"{more}{count:,} files, "
    others = f" and {count - NAMED:,} more" if count > NAMED else ""
    verb, them = ("is", "it") if count == 1 and not more else ("are", "them")
    if behind["size_bytes"] > MAX_SNAPSHOT:
        remedy = f"{them} would be too large to copy: mount the folder with `--mount DIR:/data`"
    else:
        pattern = one_line(behind["add_with"])
        option = f"`--include {shlex.quote(pattern)}`"
        is_all = them == "it" or pattern.endswith("/")
        remedy = f"add {them} with {option}" if is_all else f"add those the job needs, such as with {option}"
    yield (
        f"note: {files}{size(behind['size_bytes'])}, ignored by git, {verb} not copied: "
        f"{', '.join(names[:NAMED])}{others}; {remedy}"
    )


def launcher_of(run: str) -> str | None:
    """Return the program that a line starts with, if it starts ranks itself: a launcher named by its path."""
    try:
        arguments = shlex.split(run.strip().partition("\n")[0], comments=True)
    except ValueError:
        return None
    while arguments and (arguments[0] == "exec" or ASSIGNMENT.match(arguments[0])):
        arguments.pop(0)
    _, slash, name = arguments[0].rpartition("/") if arguments else ("", "", "")
    if not slash:
        return None
    return arguments[0] if name in LAUNCHERS else None


def unseen_environment(env: Mapping[str, str], home: Path) -> str | None:
    """Return the activated Python environment unless this machine's server has it on the PATH of jobs."""
    place = env.get("VIRTUAL_ENV") or env.get("CONDA_PREFIX")
    path = (read_server_file(home) or {}).get("path")
    if not place or not isinstance(path, str):
        return None
    programs = os.path.realpath(f"{place}/bin")
    return None if any(os.path.realpath(entry) == programs for entry in path.split(":")) else place
