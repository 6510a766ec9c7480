"""A real cluster in a directory of its own, whose control plane is started again whenever it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.client import Shoal

REPO = Path(__file__).resolve().parents[2]


class SoakCluster:
    """Start, kill and find the processes of one home. Signals nothing that is not this home's."""

    def __init__(self, root: Path, demo: str = "4x4", env: dict[str, str] | None = None) -> None:
        self.home = root / "home"
        self.witness = root / "witness"
        self.witness.mkdir()
        self.witness.chmod(0o777)
        root.chmod(0o755)
        self.env = {**os.environ, "SHOAL_HOME": str(self.home), **(env or {})}
        self._demo = demo
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        self.starts = 0
        self.start()

    def start(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._server = subprocess.Popen(
                [
                    *(sys.executable, "-m", "shoal.cli.main", "up", "--foreground"),
                    *("--demo", self._demo, "--listen", "127.0.0.1:0"),
                    *("--mount-roots", str(self.witness)),
                ],
                env=self.env,
                stdout=subprocess.DEVNULL,
                stderr=(self.witness.parent / "server.err").open("ab"),
            )
            self.starts += 1

    def keep_alive(self) -> None:
        """What systemd would do: call often."""
        if self._server is not None and self._server.poll() is not None:
            self.start()

    def client(self, patience_s: float = 120.0) -> Shoal:
        return Shoal(env=self.env, patience_s=patience_s)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.keep_alive()
            try:
                self.client(patience_s=0.1).status()
            except Exception:  # noqa: BLE001 - any failure means: not yet
                time.sleep(0.1)
            else:
                return
        told = (self.witness.parent / "server.err").read_text()[-2000:]
        raise AssertionError(f"the control plane did not answer within {timeout_s} s:\n{told}")

    # Whom to kill.

    def control_pids(self) -> list[int]:
        return [self._server.pid] if self._server is not None and self._server.poll() is None else []

    def supervisor_pids(self) -> list[int]:
        return [pid for _, pid in self._supervisors()]

    def rank_pids(self) -> list[int]:
        """Every process of every job: whatever carries an attempt id of this home in its environment."""
        return [pid for pid, attempt_id in self._marked() if attempt_id in self._live()]

    def leftovers(self) -> list[str]:
        """Processes of this home's jobs that still live."""
        known = {path.name for where in ("live", "kept") for path in (self.home / "spool" / where).glob("*")}
        return [f"{pid} {_cmdline(pid)}" for pid, attempt_id in self._marked() if attempt_id in known] + [
            f"{pid} supervisor of {share}" for share, pid in self._supervisors()
        ]

    def _live(self) -> set[str]:
        return {path.name for path in (self.home / "spool" / "live").glob("*")}

    def _supervisors(self) -> Iterator[tuple[Path, int]]:
        for claimed in (self.home / "spool" / "live").glob("*/*/claimed"):
            try:
                pid = int(json.loads(claimed.read_bytes())["pid"])
            except (OSError, ValueError, KeyError):
                continue
            if str(claimed.parent) in _cmdline(pid):
                yield claimed.parent, pid

    def _marked(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            for item in environ.split(b"\0"):
                if item.startswith(b"SHOAL_ATTEMPT_ID="):
                    yield int(entry.name), item.partition(b"=")[2].decode()

    def kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def close(self) -> None:
        """Ask the control plane to end; jobs are the caller's business."""
        with self._lock:
            self._is_closing = True
            if self._server is not None and self._server.poll() is None:
                self._server.terminate()
                self._server.wait(30)


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
