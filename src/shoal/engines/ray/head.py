"""Shoal's own Ray on this machine: its head listens on loopback, needs a token, and keeps its state on
disk.

It is started on the first request if it does not reply, and left running: jobs do not depend on it, but
finding it is faster than starting it. The start is repeated, because Ray gives up too early on a busy
machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from shoal import bounded_file
from shoal.engines.ray.agent import launch
from shoal.engines.ray.config import RayConfig, check_files, check_token_file
from shoal.engines.ray.parse import missing_ray_error
from shoal.engines.ray.probe import probe
from shoal.engines.ray.render import HEAD_PORTS, head_command, head_environment
from shoal.engines.refusal import is_name
from shoal.errors import EngineUnreachable
from shoal.runtime.agent import spool_root
from shoal.runtime.files import spool

TRIES = 5
MAX_LOG_BYTES = 1 << 20
START_S = 120.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


class HeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the head's process."""

    port: int
    pid: int
    ticks: int
    boot: str
    temp: str = ""
    """The folder of Ray's sockets and logs. Older versions did not record it."""
    inode: int = 0
    """The inode of the folder that the record was written in. In a copy of that folder, the record is about
    the original's head. Older versions did not record it, so theirs may be, too: no folder has inode 0."""


def finder(config: RayConfig, home: Path) -> Callable[[], tuple[str, Path]]:
    """Return a function that finds the address of Ray and the token file.

    It returns for our own Ray when that runs, and for another Ray when that has answered a probe.
    """

    def find() -> tuple[str, Path]:
        if config.address:
            check_files(config)
            probe(config)
            return config.address, Path(config.token_file)
        head = RayHead(home / "ray", config.ray_python)
        return head.ensure(), head.token_file

    return find


class RayHead:
    """Shoal's own Ray head. Blocking. Several processes may ask for it at once; one of them starts it."""

    def __init__(self, folder: Path, ray_python: str) -> None:
        self._folder = folder
        self._ray_python = ray_python
        self.token_file = folder / "token"

    def ensure(self) -> str:
        """Return its address; start it if necessary.

        `EngineUnreachable`: it could not be started; the message has its reason. `SpecError`: Ray is not
        installed.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make_token()
            record = self._read()
            if record is None or not (is_alive(record) and is_listening(record.port)):
                if record is not None:
                    self._end(record)
                record = self._start(lock.fileno())
        return f"{LOOPBACK}:{record.port}"

    def is_running(self) -> bool:
        """Return whether its process lives, not whether it replies. Starts nothing."""
        record = self._read()
        return record is not None and is_alive(record)

    def stop(self) -> bool:
        """End it with all its processes. False: it did not run. Node agents and jobs keep running."""
        record = self._read()
        if record is None or not is_alive(record):
            return False
        self._end(record)
        if record.temp:
            shutil.rmtree(Path(record.temp).parent, ignore_errors=True)
        return True

    def _start(self, lock: int) -> HeadRecord:
        last_line = ""
        for _ in range(TRIES):
            record = self._start_once(lock)
            if record is not None:
                return record
            if missing := missing_ray_error(self._log_text(), self._ray_python):
                raise missing
            last_line = self._last_words()
        raise EngineUnreachable(
            f"Ray's head did not start in {TRIES} tries; it last said: {last_line}",
            hint=f"see {self._folder / 'head.log'}",
        )

    def _start_once(self, lock: int) -> HeadRecord | None:
        """Start it once, at new ports: another process may have taken those of the last try."""
        port, *others = free_ports(1 + len(HEAD_PORTS))
        temp = make_temp(self._folder)
        with contextlib.suppress(FileNotFoundError):
            (temp / "ray_current_cluster").unlink()  # Ray refuses to start while this file is left over
        node = socket.gethostname().partition(".")[0]
        command = head_command(
            self._ray_python, node if is_name(node) else "local", port, tuple(others), temp
        )
        env = head_environment(os.environ, self.token_file, self._folder / "gcs")
        started = self._launch(command, env, lock, port, temp)
        deadline = time.monotonic() + START_S
        while is_alive(started) and time.monotonic() < deadline:
            if "Ray runtime started" in self._log_text() and is_listening(port):
                return started
            time.sleep(POLL_S)
        self._end(started)
        return None

    def _launch(
        self, command: list[str], env: dict[str, str], lock: int, port: int, temp: Path
    ) -> HeadRecord:
        """Start the process. Its record exists before it does, and other callers wait until then, so none
        is lost.
        """
        file = self._folder / "head.json"
        inode = self._folder.stat().st_ino
        more = {"port": port, "boot": spool.boot_id(), "temp": str(temp), "inode": inode}
        with (self._folder / "head.log").open("wb") as log_file:
            is_done = launch(str(file), lock, more, command, env, log_file, b"")
        record = self._read()
        if not is_done or record is None:
            raise EngineUnreachable(
                f"{command[0]} cannot be started: {self._last_words()}",
                hint="name a Python with Ray in it: `shoal connect ray --ray-python PATH`",
            )
        return record

    def _end(self, record: HeadRecord) -> None:
        """End all of its session, which has everything that it started."""
        if record.boot != spool.boot_id():
            return
        # Some of Ray's processes ignore SIGTERM (2.60: ten seconds passed). The state that matters is on
        # disk.
        for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
            pids = _session(record.pid, record.ticks)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + patience_s
            while _session(record.pid, record.ticks) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def _make_token(self) -> None:
        if not self.token_file.exists():
            spool.durable_write(self.token_file, secrets.token_hex(32).encode())
        check_token_file(self.token_file)

    def _read(self) -> HeadRecord | None:
        try:
            body = bounded_file.read_whole(self._folder / "head.json", spool.MAX_RECORD)
            record = msgspec.json.decode(body, type=HeadRecord)
            return record if record.inode == self._folder.stat().st_ino else None
        except FileNotFoundError:
            return None

    def _log_text(self) -> str:
        return bounded_file.read_end(self._folder / "head.log", MAX_LOG_BYTES).decode("utf-8", "replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._log_text().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def is_alive(record: HeadRecord) -> bool:
    """Return whether exactly this process runs. One that has ended may exist until it is reaped."""
    return record.boot == spool.boot_id() and record.pid in _session(record.pid, record.ticks)


def is_listening(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=5):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Return different free ports of this machine."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in held]
    for server in held:
        server.close()
    return ports


def make_temp(folder: Path, base: str = "") -> Path:
    """Return the folder for that head's sockets, without creating it. Short: Linux allows 107 characters.

    Ray opens it to every user, so it lies inside a directory that does not, where this user's tasks are,
    too; also if another user had taken that directory's name.
    """
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    try:
        above = f"{spool_root.find_or_make_root(base)}/ray-{digest}"
        spool_root.make_private_directory(above)
    except OSError as error:
        raise EngineUnreachable(
            f"there is no directory for Ray's sockets that only user {os.getuid()} can change: {error}",
            hint="ls -ld /tmp /tmp/shoal-*",
        ) from error
    return Path(above) / "t"


def _session(leader: int, ticks: int) -> set[int]:
    """Return the living processes of this process's session; none if another process has its pid now."""
    if spool.start_ticks(leader) not in (ticks, None):
        return set()
    pids = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == leader and fields[0] not in (b"Z", b"X"):
                    pids.add(int(entry.name))
    return pids
