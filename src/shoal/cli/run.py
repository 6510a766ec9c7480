"""`shoal run`: submit a job from a file, flags or both, and follow it to its end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from shoal.cli.flags import JsonFlag
from shoal.cli.job_flags import NO_FLAGS, JobFlags
from shoal.cli.quick import STDIN
from shoal.cli.show import slow_work
from shoal.cli.submit import command_line, filled, follow, is_served, remark, start_server, submit_flags
from shoal.cli.text import one_line
from shoal.errors import SpecError


def run(
    file: Annotated[Path | None, Parameter(help="A job file (YAML), or `-` for standard input.")] = None,
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
    if file is None:
        return submit_flags(flags.given(), program, detach=detach, json=json)
    return submit_file(str(file), flags.given(), program, detach=detach, json=json)


def submit_file(
    file: str, flags: dict[str, Any], program: tuple[str, ...], *, detach: bool, json: bool
) -> int:
    """Read the file here, where its lines can be named, with the flags put over it."""
    from shoal.client.sdk import Shoal
    from shoal.spec.files import load_job, read_job

    told = {**flags, "env": tuple(filled(pair) for pair in flags.get("env", ()))}
    if program:
        told["run"] = command_line(program)
    if file == STDIN:
        spec = read_job(sys.stdin.buffer.read(2 << 20), "standard input", told)
    elif not Path(file).exists() and Path(file).suffix not in (".yaml", ".yml"):
        raise SpecError(
            f"no job file `{one_line(file)}`", hint="a program comes after `--`: `shoal run -- COMMAND`"
        )
    else:
        spec = load_job(file, told)
    if not is_served():
        start_server()
    is_from_file = file != STDIN and "workdir" not in flags
    base = Path(file).absolute().parent if is_from_file else Path.cwd()
    with Shoal() as shoal:
        with slow_work() as shoal.on_progress:
            submitted = shoal.submit_spec(spec, base)
        remark(spec.run, submitted, spec.env)
        return follow(shoal, submitted, detach=detach, json=json)
