"""Processes a benchmark starts: started in a session of their own, watched, and always stopped.

Only processes started here are ever signalled, by their id and start time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class BenchmarkError(Exception):
    """The measurement could not be made. The message says what is missing."""


@dataclass(frozen=True)
class Usage:
    """What a set of processes uses: its own memory (PSS), and CPU seconds until now."""

    num_processes: int
    pss_bytes: int
    cpu_s: float


def wait_until(is_true: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until the condition holds. `BenchmarkError` names `what` did not happen in time."""
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{what} did not happen within {timeout_s:g} s")
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now. If another process takes one before it is used, the start
    fails loudly.
    """
    held = [socket.socket() for _ in range(count)]
    try:
        for bound_socket in held:
            bound_socket.bind(("127.0.0.1", 0))
        return [int(bound_socket.getsockname()[1]) for bound_socket in held]
    finally:
        for bound_socket in held:
            bound_socket.close()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def call(
    command: Sequence[str | Path], *, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
) -> str:
    """Run to the end and return the output. If the program fails, `BenchmarkError` quotes the output."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-2000:]
        raise BenchmarkError(f"`{' '.join(map(str, command))}` exited with {done.returncode}: {output}")
    return done.stdout


def spawn(
    command: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start in the background, in a session of its own, writing to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            cwd="/",
        )


def stat_fields(pid: int) -> list[str] | None:
    """Return /proc/PID/stat after the name, so that index 1 is the parent; None once the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_gone(pid: int) -> bool:
    """Whether it has ended. A zombie counts as gone: its parent has only not collected it."""
    fields = stat_fields(pid)
    return fields is None or fields[0] == "Z"


def descendants(roots: Iterable[int]) -> set[int]:
    """Return the `roots` that are alive, and all their descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := stat_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    living: set[int] = set()
    waiting = [pid for pid in roots if stat_fields(pid)]
    while waiting:
        pid = waiting.pop()
        if pid not in living:
            living.add(pid)
            waiting += children.get(pid, [])
    return living


def usage(pids: Iterable[int]) -> Usage:
    """Return memory and CPU of exactly these processes. Processes that are gone count nothing."""
    count, pss, ticks = 0, 0, 0
    for pid in pids:
        fields = stat_fields(pid)
        if fields is None or is_gone(pid):
            continue
        count += 1
        ticks += int(fields[11]) + int(fields[12])
        pss += _pss(pid, resident=int(fields[21]) * PAGE)
    return Usage(count, pss, ticks / TICKS)


def _pss(pid: int, *, resident: int) -> int:
    """Return the proportional set size; the resident size if the kernel does not report PSS."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return resident
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), resident)


def stop(pids: Iterable[int], *, grace_s: float = 10.0) -> None:
    """Send SIGTERM, then SIGKILL after `grace_s`. A pid that now belongs to another process is left alone."""
    left = {pid: fields[19] for pid in pids if (fields := stat_fields(pid))}
    deadline = time.monotonic() + grace_s
    for pid in left:
        _signal(pid, signal.SIGTERM)
    while left and time.monotonic() < deadline:
        left = _living(left)
        time.sleep(0.05)
    for pid in _living(left):
        _signal(pid, signal.SIGKILL)


def _living(started: dict[int, str]) -> dict[int, str]:
    """Return those that still run with their original start time. Reaps our own zombies on the way."""
    living = {}
    for pid, start in started.items():
        with contextlib.suppress(ChildProcessError):  # not our child: a daemon that detached itself
            os.waitpid(pid, os.WNOHANG)
        fields = stat_fields(pid)
        if fields and not is_gone(pid) and fields[19] == start:
            living[pid] = start
    return living


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
