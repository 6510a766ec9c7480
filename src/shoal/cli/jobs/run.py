"""`shoal run`: submit a job from a file, flags or both, and follow it to its end.

`JobFlags` has a flag for each YAML field of a job. `spec` reads and checks their values.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Group, Parameter

from shoal.cli.arguments import STDIN
from shoal.cli.flags import JsonFlag
from shoal.cli.jobs.submit import (
    command_line,
    follow,
    is_served,
    print_notes,
    resolve_env,
    start_server,
    submit_flags,
)
from shoal.cli.output import slow_work
from shoal.cli.text import one_line
from shoal.errors import SpecError

NEEDS = Group("What it needs on each node", sort_key=1)
AGAIN = Group("When it fails", sort_key=2)
Text = str | None
Many = tuple[str, ...]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """The flags as typed text. Only `spec` knows what `32GB..` means."""

    name: Annotated[Text, Parameter(name=["--name", "-n"], help="The job's name.")] = None
    project: Annotated[Text, Parameter(name=["--project", "-p"], help="The project it belongs to.")] = None
    queue: Annotated[Text, Parameter(help="The queue it waits in.")] = None
    priority: Annotated[
        Text, Parameter(help="-1000 to 1000 or a class; higher starts first.", allow_leading_hyphen=True)
    ] = None
    time_limit: Annotated[Text, Parameter(help="Such as `2h`; then the job is stopped.")] = None
    deadline: Annotated[Text, Parameter(help="When it should have ended: `14:00` UTC, or in `6h`.")] = None
    workdir: Annotated[
        Text, Parameter(help="Folder to copy to the job, `''` for none; by default the current one.")
    ] = None
    include: Annotated[
        Many, Parameter(name="--include", negative="", help="Files to copy though git ignores them: `data/`.")
    ] = ()
    exclude: Annotated[
        Many, Parameter(name="--exclude", negative="", help="Files not to copy: `*.ckpt`.")
    ] = ()
    shared: Annotated[bool | None, Parameter(negative="", help="One working folder for all nodes.")] = None
    setup: Annotated[Text, Parameter(help="A command to run first, once on each node.")] = None
    env: Annotated[
        Many, Parameter(name=["--env", "-e"], negative="", help="NAME=VALUE, or NAME as set here.")
    ] = ()
    secrets: Annotated[
        Many, Parameter(name="--secret", negative="", help="NAME as set here; the value is sent encrypted.")
    ] = ()
    mounts: Annotated[Many, Parameter(name="--mount", negative="", help="SOURCE:TARGET[:ro].")] = ()
    after: Annotated[
        Many, Parameter(name="--after", negative="", help="Start after this job, or array, has succeeded.")
    ] = ()
    array: Annotated[Text, Parameter(help="Many jobs: `0..99`, `0-99%10`.")] = None
    gpus: Annotated[Text, Parameter(group=NEEDS, help="`8`, `H100`, `H100:8`, or `0.5` of one.")] = None
    nodes: Annotated[Text, Parameter(group=NEEDS, help="How many nodes: `2` or `2..4`.")] = None
    cpus: Annotated[Text, Parameter(group=NEEDS, help="`4`, `0.5` or `4+`.")] = None
    memory: Annotated[Text, Parameter(group=NEEDS, help="`32GB` or `32GB..`.")] = None
    disk: Annotated[Text, Parameter(group=NEEDS, help="`100GB`.")] = None
    ranks_per_node: Annotated[
        Text, Parameter(group=NEEDS, help="Processes; by default one for each GPU.")
    ] = None
    exclusive: Annotated[
        bool | None, Parameter(negative="", group=NEEDS, help="Whole nodes, shared with no other job.")
    ] = None
    exclude_nodes: Annotated[
        Many, Parameter(name="--exclude-node", negative="", group=NEEDS, help="A node it must not run on.")
    ] = ()
    require: Annotated[
        Many, Parameter(name="--require", negative="", group=NEEDS, help="LABEL=VALUE its nodes must have.")
    ] = ()
    topology: Annotated[
        Text, Parameter(group=NEEDS, help="All nodes within one `rack`, or `spread:rack`: each in another.")
    ] = None
    retry: Annotated[Text, Parameter(group=AGAIN, help="How often to retry.")] = None
    retry_on: Annotated[
        Many, Parameter(name="--retry-on", negative="", help="exit signal oom setup time_limit.", group=AGAIN)
    ] = ()
    retry_backoff: Annotated[
        Text, Parameter(group=AGAIN, help="Pause before the first retry; it doubles.")
    ] = None
    log_rules: Annotated[
        Many,
        Parameter(
            name="--log-rule", negative="", help="REGEX=exclude_node or REGEX=stop_retries.", group=AGAIN
        ),
    ] = ()
    checkpoint: Annotated[Text, Parameter(group=AGAIN, help="Folder kept across attempts.")] = None
    world: Annotated[
        Text, Parameter(group=AGAIN, help="`any`: process groups need not span all ranks of the job.")
    ] = None
    grace: Annotated[Text, Parameter(group=AGAIN, help="Time between SIGTERM and SIGKILL.")] = None
    network: Annotated[Text, Parameter(help="`open`: other projects may connect to its ports.")] = None
    fence: Annotated[
        Text, Parameter(group=AGAIN, help="How long a job may be cut off before it stops itself.")
    ] = None

    def typed_flags(self) -> dict[str, Any]:
        """Return the flags that were typed, by their spec names."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None and value != ()}


NO_FLAGS = JobFlags()


def run(
    file: Annotated[Path | None, Parameter(help="A job file (YAML), or `-` for standard input.")] = None,
    /,
    *,
    flags: JobFlags = NO_FLAGS,
    detach: Annotated[
        bool, Parameter(name=["--detach", "-d"], negative="", help="Print the job's name and return.")
    ] = False,
    json: JsonFlag = False,
    program: Annotated[tuple[str, ...], Parameter(parse=False)] = (),
) -> int:
    """Submit a job and follow its output; the exit code is the job's own.

    COMMAND with ARGS runs as it is. One quoted COMMAND alone is a line for a
    shell: `shoal run -- 'make data && python train.py'`.

    Flags override the file. If no control plane runs on this machine, one is
    started in the background. Ctrl-C detaches: the job keeps running, and the
    commands to follow or stop it are printed.
    """
    if file is None:
        return submit_flags(flags.typed_flags(), program, detach=detach, json=json)
    return submit_file(str(file), flags.typed_flags(), program, detach=detach, json=json)


def submit_file(
    file: str, flags: dict[str, Any], program: tuple[str, ...], *, detach: bool, json: bool
) -> int:
    """Read the file here, so that errors can name its lines, and apply the flags over it."""
    from shoal.client.sdk import Shoal
    from shoal.spec.files import load_job, read_job

    values = {**flags, "env": tuple(resolve_env(pair) for pair in flags.get("env", ()))}
    if program:
        values["run"] = command_line(program)
    if file == STDIN:
        spec = read_job(sys.stdin.buffer.read(2 << 20), "standard input", values)
    elif not Path(file).exists() and Path(file).suffix not in (".yaml", ".yml"):
        raise SpecError(
            f"no job file `{one_line(file)}`", hint="a program comes after `--`: `shoal run -- COMMAND`"
        )
    else:
        spec = load_job(file, values)
    if not is_served():
        start_server()
    is_from_file = file != STDIN and "workdir" not in flags
    base = Path(file).absolute().parent if is_from_file else Path.cwd()
    with Shoal() as shoal:
        with slow_work() as shoal.on_progress:
            submitted = shoal.submit_spec(spec, base)
        print_notes(spec.run, submitted, spec.env)
        return follow(shoal, submitted, detach=detach, json=json)
