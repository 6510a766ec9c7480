"""Processes that cannot be started leave nothing behind."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.runtime.launch import Launcher


def num_open() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("name", "works"), [("fork", 0), ("pipe", 1)])
def test_start_that_fails_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, name: str, works: int
) -> None:
    confinement: Any = SimpleNamespace(sandbox=None)
    launcher = Launcher(confinement, "/nowhere")
    before, real = num_open(), getattr(os, name)
    left = iter(range(works))

    def fail() -> Any:
        if next(left, None) is not None:
            return real()
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, name, fail)
    with pytest.raises(BlockingIOError):
        launcher.start_script("true", {})
    assert num_open() == before
    for fd in (launcher._failures, launcher._report):
        os.close(fd)
