"""The engine and the clock that tests of this room task."""

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
from shoal.runtime.files import spool
from tests.support.fakes.local_engine import STAND_IN, LocalEngineLab


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1_800_000_000.0)


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalEngineLab]:
    monkeypatch.setattr(engine_module, "supervisor_command", lambda d: [sys.executable, STAND_IN, d])
    local = LocalEngineLab(tmp_path / "home")
    yield local
    for pid in local.children:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for directory in local.home.glob("spool/*/*/*"):
        with contextlib.suppress(msgspec.DecodeError):
            spool.kill_leftovers(directory)
