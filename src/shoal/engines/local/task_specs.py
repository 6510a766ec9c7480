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
    directory, job_id = task_specs[0].folders.checkpoint_dir, task_specs[0].identity.job_id
    if directory is None:
        return task_specs
    folder = home / "checkpoints"
    if not is_name(job_id) or Path(directory) != folder / job_id:
        raise EngineRefused(
            f"job {job_id} cannot keep its checkpoints in {directory}",
            hint=f"the only place is {folder}/<job id>",
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    _make(folder, job_id, task_specs[0].isolation.uid)
    return _with_folders(task_specs, checkpoint_dir=str(folder.resolve() / job_id))


def with_model_dirs(home: Path, task_specs: tuple[TaskSpec, ...]) -> tuple[TaskSpec, ...]:
    """Return the task specs with the real path of the checkpoint that they serve.

    `EngineRefused`: it is no checkpoint, or it is gone.
    """
    wanted = task_specs[0].folders.model_dir
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
    return _with_folders(task_specs, model_dir=str(real))


def _with_folders(task_specs: tuple[TaskSpec, ...], **folders: str) -> tuple[TaskSpec, ...]:
    replace = msgspec.structs.replace
    return tuple(
        replace(task_spec, folders=replace(task_spec.folders, **folders)) for task_spec in task_specs
    )


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
    replace, can_switch = msgspec.structs.replace, confinement is None or "uid" in confinement
    return tuple(
        replace(
            task_spec,
            ranks=replace(task_spec.ranks, master_addr=master_addr, master_port=master_port),
            isolation=replace(
                task_spec.isolation,
                confinement=confinement,
                uid=task_spec.isolation.uid if can_switch else None,
            ),
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
