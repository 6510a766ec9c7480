"""This machine, which all tests share: its programs, its networks, and who lives on it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], env={"PATH": PATH}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, (words, done.stderr)
    return done.stdout


def who(pid: int) -> str:
    """The process, and when it was started: another one may have its number some day. Empty: it is dead."""
    with contextlib.suppress(OSError):
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid} {rest[18]}" if state != "Z" else ""
    return ""


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has taken away."""
    return bool(who(pid))


def until_dead(pids: list[int], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))
