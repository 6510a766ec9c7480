"""Processes that cannot be started leave nothing behind."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.process.launcher import Launcher
from tests.support.runtime.tasks import open_files


@pytest.mark.parametrize("num_pipes", [1, 2])
def test_start_that_fails_leaves_no_pipe(monkeypatch: pytest.MonkeyPatch, num_pipes: int) -> None:
    confinement: Any = SimpleNamespace(sandbox=None)
    launcher = Launcher(confinement, "/nowhere")
    real = os.pipe
    pipes: list[str] = []

    def pipe() -> tuple[int, int]:
        if len(pipes) == num_pipes:
            fail()
        ends = real()
        pipes.append(f"pipe:[{os.fstat(ends[0]).st_ino}]")
        return ends

    def fail() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "pipe", pipe)
    monkeypatch.setattr(os, "fork", fail)
    with pytest.raises(BlockingIOError):
        launcher.start_script("true", {})
    assert len(pipes) == num_pipes
    assert set(pipes).isdisjoint(open_files())
    for fd in (launcher._failures, launcher._report):
        os.close(fd)
