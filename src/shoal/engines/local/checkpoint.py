"""The directory a job keeps its checkpoints in: made once, given to the job's user, removed only when asked.

Refuses to use anything but a real directory at `<home>/checkpoints/<job_id>`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from shoal.engines.refusal import is_name
from shoal.errors import EngineRefused
from shoal.runtime import spool
from shoal.wire import Order


def with_checkpoint(home: Path, orders: tuple[Order, ...]) -> tuple[Order, ...]:
    """The orders with the real path of their checkpoint directory, which is there afterwards.

    May be repeated. `EngineRefused`: it cannot be used; `OSError`: it could not be made now.
    """
    first = orders[0]
    if first.checkpoint_dir is None:
        return orders
    folder = home / "checkpoints"
    if not is_name(first.job_id) or Path(first.checkpoint_dir) != folder / first.job_id:
        raise EngineRefused(
            f"job {first.job_id} cannot keep its checkpoints in {first.checkpoint_dir}",
            hint=f"the only place is {folder}/<job id>",
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    _make(folder, first.job_id, first.uid)
    real = str(folder.resolve() / first.job_id)
    return tuple(msgspec.structs.replace(order, checkpoint_dir=real) for order in orders)


def with_model(home: Path, orders: tuple[Order, ...]) -> tuple[Order, ...]:
    """The orders with the real path of the checkpoint that they serve.

    `EngineRefused`: it is none, or gone by now.
    """
    wanted = orders[0].model_dir
    if wanted is None:
        return orders
    folder, path = home / "checkpoints", Path(wanted)
    is_ours = path.parent.parent == folder and is_name(path.parent.name) and is_name(path.name)
    real = folder.resolve() / path.parent.name / path.name
    if not is_ours or os.path.realpath(real) != str(real) or not real.is_dir():
        raise EngineRefused(
            f"there is no checkpoint to serve at {wanted}",
            hint="the job may have removed it for newer ones: `shoal serve` the file again",
        )
    return tuple(msgspec.structs.replace(order, model_dir=str(real)) for order in orders)


def _make(folder: Path, name: str, uid: int | None) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            _refuse_what_is_no_directory(folder, name, fd)
        # As any other user nothing can be given away; then the job runs as that user, or not at all.
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
