"""PyTorch's record of each rank's last NCCL calls. It is written when ranks hang, and kept beside the log.

A rank writes it from a thread of its own when a byte arrives in its named pipe, however stuck the rank is.
Any name below a job's work directory may have become anything, so no link is followed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable

from shoal import bounded_file

LIMIT_S = 1.2
"""Ranks read their pipe once a second."""
LOOK_S = 0.02
MAX_BYTES = 16 << 20


def recorder_variables(work: str) -> dict[str, str]:
    """Return variables that make ranks on NCCL keep a record and write it on request. The job may
    override them.
    """
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{work}/.nccl_record_",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{work}/.nccl_pipe_",
    }


def request_records(work: str, ranks: Iterable[int]) -> set[int]:
    """Ask these ranks to write their records, and return those that listen. Does not wait."""
    return {rank for rank in ranks if _has_asked(f"{work}/.nccl_pipe_{rank}.pipe", _record(work, rank))}


def collect_records(work: str, ranks: set[int], folder: str) -> dict[int, str]:
    """Wait for the records of these ranks, copy them into a folder, and return the path of each.

    Blocks for at most `LIMIT_S`. An unfinished record is copied as it is then.
    """
    until = time.monotonic() + LIMIT_S
    while ranks and any(not _size(_record(work, rank)) for rank in ranks) and time.monotonic() < until:
        time.sleep(LOOK_S)
    kept = {rank: f"{folder}/nccl-record.{rank}" for rank in sorted(ranks)}
    return {rank: path for rank, path in kept.items() if _copy(_record(work, rank), path)}


def _record(work: str, rank: int) -> str:
    return f"{work}/.nccl_record_{rank}"


def _has_asked(pipe: str, old: str) -> bool:
    try:
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False  # the rank has no group on NCCL, or no thread reads the pipe any more
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)  # from an earlier hang
        return os.write(fd, b"1") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_size
    return 0


def _copy(source: str, target: str) -> bool:
    with contextlib.suppress(OSError):
        data = bounded_file.read_start(source, MAX_BYTES)
        if data:
            with open(target, "wb") as kept:
                kept.write(data)
            return True
    return False
