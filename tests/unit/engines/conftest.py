"""The engine and the clock that tests of this room share."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.local import engine as engine_module
from shoal.runtime import spool
from tests.support.local_engine import STAND_IN, Local


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_800_000_000.0)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setattr(engine_module, "supervisor_command", lambda d: [sys.executable, STAND_IN, d])
    local = Local(tmp_path / "home")
    yield local
    for pid in local.children:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for directory in local.home.glob("spool/*/*/*"):
        with contextlib.suppress(msgspec.DecodeError):
            spool.kill_leftovers(directory)
