"""What the local engine writes and runs: completed task specs, checkpoint directories, supervisor commands.

A checkpoint directory is created once, given to the job's user, and removed only on request. Nothing but a
real directory at `<home>/checkpoints/<job_id>` is used.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

import shoal
from shoal.engines.base import Submission
from shoal.engines.refusal import is_name
from shoal.errors import EngineRefused
from shoal.runtime.files import spool
from shoal.wire import TaskSpec


def with_checkpoint_dirs(home: Path, task_specs: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    """Return the task specs with the real path of their checkpoint directory, which exists afterwards.

    May be repeated. `EngineRefused`: it cannot be used; `OSError`: it could not be created now.
    """
    first = task_specs[0]
    if first.checkpoint_dir is None:
        return task_specs
    folder = home / "checkpoints"
    if not is_name(first.job_id) or Path(first.checkpoint_dir) != folder / first.job_id:
        raise EngineRefused(
            f"job {first.job_id} cannot keep its checkpoints in {first.checkpoint_dir}",
            hint=f"the only place is {folder}/<job id>",
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    _make(folder, first.job_id, first.uid)
    real = str(folder.resolve() / first.job_id)
    return tuple(msgspec.structs.replace(task_spec, checkpoint_dir=real) for task_spec in task_specs)


def with_model_dirs(home: Path, task_specs: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    """Return the task specs with the real path of the checkpoint that they serve.

    `EngineRefused`: it is no checkpoint, or it is gone.
    """
    wanted = task_specs[0].model_dir
    if wanted is None:
        return task_specs
    folder, path = home / "checkpoints", Path(wanted)
    is_ours = path.parent.parent == folder and is_name(path.parent.name) and is_name(path.name)
    real = folder.resolve() / path.parent.name / path.name
    if not is_ours or os.path.realpath(real) != str(real) or not real.is_dir():
        raise EngineRefused(
            f"there is no checkpoint to serve at {wanted}",
            hint="the job may have removed it for newer ones: `shoal serve` the file again",
        )
    return tuple(msgspec.structs.replace(task_spec, model_dir=str(real)) for task_spec in task_specs)


def _make(folder: Path, name: str, uid: int | None) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            _refuse_what_is_no_directory(folder, name, fd)
        # Another user than root cannot change the owner; then the job runs as that user, or not at all.
        if uid is not None and os.geteuid() == 0:
            os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
    finally:
        os.close(fd)
    spool.sync_directory(folder)


def _refuse_what_is_no_directory(folder: Path, name: str, fd: int) -> None:
    mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        raise EngineRefused(
            f"{folder / name} is not a directory: no checkpoint can be kept there",
            hint=f"`rm {folder / name}`",
        )


PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH")
"""All variables of our environment that a supervisor sees. Its ranks see their task spec's, and our PATH."""
CODE = os.path.dirname(os.path.dirname(os.path.abspath(shoal.__file__)))  # noqa: PTH100,PTH120 - a string for PYTHONPATH


NAME_ROOM = 1024
"""Room for the directory of a task on a forked supervisor's command line."""


def complete_task_specs(
    submission: Submission, master_addr: str, master_port: int, confinement: tuple[str, ...] | None
) -> tuple[TaskSpec, ...]:
    """Return the task specs with the values that this engine decides, the same for every node of the gang.

    If this machine cannot switch users, jobs run as the user that runs Shoal; `shoal nodes` says so. If
    that is unknown (None), the requested user stays: a job never runs as root because a probe failed.
    """
    can_switch = confinement is None or "uid" in confinement
    return tuple(
        msgspec.structs.replace(
            task_spec,
            master_addr=master_addr,
            master_port=master_port,
            confinement=confinement,
            uid=task_spec.uid if can_switch else None,
        )
        for task_spec in submission.task_specs
    )


def supervisor_command(directory: str) -> list[str]:
    """Return a command that runs this code whatever the current directory holds: no user site, no unsafe
    path.
    """
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.supervisor", directory]


def fork_server_command() -> list[str]:
    """Return the fork server's command. Its last word is only room for the supervisors' longer ones."""
    return [sys.executable, "-P", "-s", "-m", "shoal.runtime.process.fork_server", "." * NAME_ROOM]


def supervisor_environment(environment: Mapping[str, str], server_file: str) -> dict[str, str]:
    """Return the few variables a supervisor needs. No other `SHOAL_` variable: tokens must not travel
    here.
    """
    passed_on = {name: environment[name] for name in PASSED_ON if name in environment}
    path = environment.get("PATH", os.defpath)
    ours = {"PYTHONPATH": CODE, "SHOAL_SERVER_FILE": server_file, "SHOAL_PATH": path}
    return {"PATH": os.defpath, **passed_on, **ours}


def detect_command() -> list[str]:
    """Return a command that prints the ways to confine a job that work here, as one line of words."""
    code = "from shoal.runtime.confine.detect import detect; print(*detect())"
    return [sys.executable, "-P", "-s", "-c", code]
