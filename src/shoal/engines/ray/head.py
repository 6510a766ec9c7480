"""A Ray of our own on this machine: its head, with a token, on loopback, and what it knows on disk.

Started when somebody asks and nobody answers, and left running: jobs do not depend on it, but finding it is
faster than starting it. Its start is repeated: on a busy machine Ray gives itself up too soon.
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
from shoal.engines.ray.knock import knock
from shoal.engines.ray.parse import without_ray
from shoal.engines.ray.render import HEAD_PORTS, head_command, head_environment
from shoal.engines.refusal import is_name
from shoal.errors import EngineUnreachable
from shoal.runtime import places, spool

TRIES = 5
MAX_SAID = 1 << 20
START_S = 120.0
POLL_S = 0.2
LOOPBACK = "127.0.0.1"


class HeadRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who it is."""

    port: int
    pid: int
    ticks: int
    boot: str
    temp: str = ""
    """Where Ray has its sockets and logs. Older versions did not say so."""
    inode: int = 0
    """Of the folder that the record was written in: in a copy of it, the record is about the original's.
    Older versions did not say so, so theirs may be, too: no folder has inode 0."""


def finder(config: RayConfig, home: Path) -> Callable[[], tuple[str, Path]]:
    """Where Ray is and what proves that we belong to it. For our own Ray: once it runs; for another: once it
    has answered a knock.
    """

    def find() -> tuple[str, Path]:
        if config.address:
            check_files(config)
            knock(config)
            return config.address, Path(config.token_file)
        head = Head(home / "ray", config.ray_python)
        return head.ensure(), head.token_file

    return find


class Head:
    """Blocking. Several processes may ask for it at once; one starts it."""

    def __init__(self, folder: Path, ray_python: str) -> None:
        self._folder = folder
        self._ray_python = ray_python
        self.token_file = folder / "token"

    def ensure(self) -> str:
        """Its address. `EngineUnreachable`: it could not be started, in its own words. `SpecError`: there
        is no Ray.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (self._folder / "lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._make_token()
            record = self._read()
            if record is None or not (is_alive(record) and answers(record.port)):
                if record is not None:
                    self._end(record)
                record = self._start(lock.fileno())
        return f"{LOOPBACK}:{record.port}"

    def is_running(self) -> bool:
        """Whether its process is there; not whether it answers. Starts nothing."""
        record = self._read()
        return record is not None and is_alive(record)

    def stop(self) -> bool:
        """End it with all its processes. False: it did not run. Keepers and jobs run on."""
        record = self._read()
        if record is None or not is_alive(record):
            return False
        self._end(record)
        if record.temp:
            shutil.rmtree(Path(record.temp).parent, ignore_errors=True)
        return True

    def _start(self, lock: int) -> HeadRecord:
        said = ""
        for _ in range(TRIES):
            record = self._start_once(lock)
            if record is not None:
                return record
            if missing := without_ray(self._said(), self._ray_python):
                raise missing
            said = self._last_words()
        raise EngineUnreachable(
            f"Ray's head did not start in {TRIES} tries; it last said: {said}",
            hint=f"see {self._folder / 'head.log'}",
        )

    def _start_once(self, lock: int) -> HeadRecord | None:
        """At ports of its own each time: somebody may have taken those of the last."""
        port, *others = free_ports(1 + len(HEAD_PORTS))
        temp = make_temp(self._folder)
        with contextlib.suppress(FileNotFoundError):
            (temp / "ray_current_cluster").unlink()  # Ray refuses to start again where this is left
        node = socket.gethostname().partition(".")[0]
        command = head_command(
            self._ray_python, node if is_name(node) else "local", port, tuple(others), temp
        )
        env = head_environment(os.environ, self.token_file, self._folder / "gcs")
        started = self._launch(command, env, lock, port, temp)
        deadline = time.monotonic() + START_S
        while is_alive(started) and time.monotonic() < deadline:
            if "Ray runtime started" in self._said() and answers(port):
                return started
            time.sleep(POLL_S)
        self._end(started)
        return None

    def _launch(
        self, command: list[str], env: dict[str, str], lock: int, port: int, temp: Path
    ) -> HeadRecord:
        """Its record is there before it is, and who comes after us waits until then: none is forgotten."""
        file = self._folder / "head.json"
        inode = self._folder.stat().st_ino
        more = {"port": port, "boot": spool.boot_id(), "temp": str(temp), "inode": inode}
        with (self._folder / "head.log").open("wb") as said:
            is_done = launch(str(file), lock, more, command, env, said, b"")
        record = self._read()
        if not is_done or record is None:
            raise EngineUnreachable(
                f"{command[0]} cannot be started: {self._last_words()}",
                hint="name a Python with Ray in it: `shoal connect ray --ray-python PATH`",
            )
        return record

    def _end(self, record: HeadRecord) -> None:
        """All of its session: what it started is in it."""
        if record.boot != spool.boot_id():
            return
        # Some of Ray's never heed the first (2.60: ten seconds passed in vain); what it knows is on disk.
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

    def _said(self) -> str:
        return bounded_file.read_end(self._folder / "head.log", MAX_SAID).decode("utf-8", "replace")

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._said().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"


def is_alive(record: HeadRecord) -> bool:
    """Whether that very process runs. One that has ended may be there until somebody takes it away."""
    return record.boot == spool.boot_id() and record.pid in _session(record.pid, record.ticks)


def answers(port: int) -> bool:
    try:
        with socket.create_connection((LOOPBACK, port), timeout=5):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Of this machine, now; none of them twice."""
    held = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def make_temp(folder: Path, base: str = "") -> Path:
    """Where that head has its sockets, not made itself. Short: Linux allows 107 characters for one. Ray lets
    everybody into it, so it is inside another that does not, where this user's shares are too: also where
    somebody had taken its name.
    """
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    try:
        above = f"{places.own_root(base)}/ray-{digest}"
        places.make_own(above)
    except OSError as error:
        raise EngineUnreachable(
            f"there is no directory for Ray's sockets that only user {os.getuid()} can change: {error}",
            hint="ls -ld /tmp /tmp/shoal-*",
        ) from error
    return Path(above) / "t"


def _session(leader: int, ticks: int) -> set[int]:
    """The living processes of the session that this process began; none where its number is another's."""
    if spool.start_ticks(leader) not in (ticks, None):
        return set()
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit():
                fields = (entry / "stat").read_bytes().rpartition(b")")[2].split()
                if int(fields[3]) == leader and fields[0] not in (b"Z", b"X"):
                    found.add(int(entry.name))
    return found
