"""`shoal run`: submit a job from a file, flags or both, and follow it to its end."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli import daemon
from shoal.cli.flags import JsonFlag
from shoal.cli.follow import follow_array, follow_job
from shoal.cli.home import holder
from shoal.cli.job_flags import NO_FLAGS, JobFlags
from shoal.cli.show import note, print_json
from shoal.cli.text import one_line
from shoal.client.credentials import LOCAL, Credentials, read_server_file
from shoal.client.sdk import Shoal
from shoal.errors import SpecError
from shoal.settings import home_from_env
from shoal.spec import JobSpec, spec_from_flags
from shoal.spec.files import load_job, read_job


def run(
    file: Annotated[str | None, Parameter(help="A job file (YAML), or `-` for standard input.")] = None,
    /,
    *,
    flags: JobFlags = NO_FLAGS,
    detach: Annotated[
        bool, Parameter(name=["--detach", "-d"], negative="", help="Print its name, return.")
    ] = False,
    json: JsonFlag = False,
    program: Annotated[tuple[str, ...], Parameter(parse=False)] = (),
) -> int:
    """Submit a job and follow its output; the exit code is the job's own.

    COMMAND with ARGS runs as it is; one quoted COMMAND alone is a line for a
    shell: `shoal run -- 'make data && python train.py'`.

    Flags override the file. With no control plane running on this machine, one
    is started in the background. Ctrl-C detaches: the job runs on, and how to
    follow or stop it is printed.
    """
    given = flags.given()
    if program:
        given["run"] = command_line(program)
    spec = read_spec(file, given)
    is_from_file = file is not None and file != "-" and flags.workdir is None
    ensure_server()
    base = Path(str(file)).absolute().parent if is_from_file else Path.cwd()
    return submit(spec, base, detach=detach, json=json)


def command_line(program: tuple[str, ...]) -> str:
    """What follows `--` as a line for a shell: one word is that line already, several are quoted."""
    return program[0] if len(program) == 1 else shlex.join(program)


def read_spec(file: str | None, flags: dict[str, Any]) -> JobSpec:
    """The job the file and the flags describe together. Every mistake in both is reported."""
    if file is None:
        if "run" not in flags:
            raise SpecError("nothing to run", hint="`shoal run -- python train.py`, or `shoal run job.yaml`")
        return spec_from_flags(**flags)
    if file == "-":
        return read_job(sys.stdin.buffer.read(2 << 20), "standard input", flags)
    if not Path(file).exists() and Path(file).suffix not in (".yaml", ".yml"):
        raise SpecError(
            f"no job file `{one_line(file)}`", hint="a program comes after `--`: `shoal run -- COMMAND`"
        )
    return load_job(file, flags)


def ensure_server() -> None:
    """Start this machine's control plane if that is the one to use and it is not running."""
    home = home_from_env()
    if os.environ.get("SHOAL_URL") or (Credentials(home).load()["current"] or LOCAL) != LOCAL:
        return
    if holder(home) is not None and read_server_file(home) is not None:
        return
    running = daemon.start()
    if not running.was_running:
        note(f"no control plane was running; started one at {running.url} (`shoal down` stops it)")
    if running.first_token:
        note(f"your admin token is saved in {Credentials(home).path}")


def submit(spec: JobSpec, base: Path, *, detach: bool, json: bool) -> int:
    with Shoal() as shoal:
        if spec.array is None:
            job = shoal.submit(spec, base=base)
            if not detach:
                return follow_job(shoal, job, json=json)
            print_json(job.data) if json else print(one_line(job.ref))
            return 0
        elements = shoal.submit_array(spec, base=base)
        if not detach:
            return follow_array(elements, json=json)
        if json:
            facts = {"array_id": elements.array_id, "count": elements.count}
            print_json({**facts, "jobs": [job.data for job in elements.jobs]})
        else:
            print(
                f"{one_line(elements.array_id)} ({elements.count} jobs from {one_line(elements.jobs[0].ref)})"
            )
        return 0
