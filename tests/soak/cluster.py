"""A real cluster in a directory of its own, whose control plane is started again whenever it dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.client import Shoal
from tests.soak import processes

REPO = Path(__file__).resolve().parents[2]
GUARD_S = 0.05


class SoakCluster:
    """Start, kill and find the processes of one home. Signals nothing that is not this home's."""

    def __init__(
        self,
        root: Path,
        *,
        demo: str = "4x4",
        env: Mapping[str, str] | None = None,
        python: str = sys.executable,
        prefix: tuple[str, ...] = (),
    ) -> None:
        """`prefix`: words before the control plane's command, such as `prlimit` with its options."""
        self.root = root
        self.home = root / "home"
        self.witness = root / "witness"
        self.witness.mkdir()
        self.witness.chmod(0o777)
        root.chmod(0o755)
        own = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
        self.env = {**own, "PYTHONPATH": str(REPO / "src"), "SHOAL_HOME": str(self.home), **(env or {})}
        self._demo = demo
        self._python = python
        self._prefix = prefix
        self._server: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closing = False
        self._began_at = 0.0
        self._ready_at: float | None = None
        self.starts = 0
        self.reopen()

    def reopen(self) -> None:
        """Start the control plane and keep it alive until `close`."""
        self._is_closing = False
        self.start()
        threading.Thread(target=self._keep_alive, daemon=True).start()

    def start(self) -> None:
        """Start the control plane, as a service manager would after it died."""
        with self._lock:
            if self._is_closing:
                return
            with (self.root / "server.err").open("ab") as words:
                self._server = subprocess.Popen(
                    [
                        *(*self._prefix, self._python, "-m", "shoal.cli.main", "up", "--foreground"),
                        *("--demo", self._demo, "--listen", "127.0.0.1:0"),
                        *("--mount-roots", str(self.witness)),
                    ],
                    env=self.env,
                    stdout=subprocess.DEVNULL,
                    stderr=words,
                )
            self._began_at, self._ready_at = time.monotonic(), None
            self.starts += 1

    def _keep_alive(self) -> None:
        """What systemd would do."""
        while not self._is_closing:
            if not self.is_up():
                self.start()
            time.sleep(GUARD_S)

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def is_up(self) -> bool:
        return self._server is not None and self._server.poll() is None

    def up_for_s(self) -> float:
        """How long this control plane has been answering; 0 while it has not yet."""
        if not self.is_up():
            return 0.0
        if self._ready_at is None:
            with contextlib.suppress(OSError, ValueError):
                if json.loads((self.home / "server.json").read_bytes())["pid"] == self.pid:
                    self._ready_at = time.monotonic()
        return 0.0 if self._ready_at is None else time.monotonic() - self._ready_at

    def began_s_ago(self) -> float:
        return time.monotonic() - self._began_at

    def client(self, patience_s: float = 120.0) -> Shoal:
        return Shoal(env=self.env, patience_s=patience_s)

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                with self.client(patience_s=0.1) as shoal:
                    shoal.status()
            except Exception:  # noqa: BLE001 - any failure means: not yet
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"the control plane did not answer within {timeout_s} s:\n{self.last_output()}")

    def last_output(self) -> str:
        return (self.root / "server.err").read_text(errors="replace")[-3000:]

    def doctor(self) -> list[dict[str, Any]]:
        """What `shoal doctor` finds broken."""
        done = subprocess.run(
            [self._python, "-m", "shoal.cli.main", "doctor", "--json"],
            env=self.env,
            capture_output=True,
            timeout=60,
            check=False,
        )
        return [finding for finding in json.loads(done.stdout) if finding["level"] == "broken"]

    def kill(self, pid: int) -> bool:
        """SIGKILL. False: it was gone already."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def find_processes(self) -> processes.HomeProcesses:
        return processes.find(self.home)

    def leftovers(self) -> list[str]:
        """Processes of this home's jobs that still live."""
        return [processes.describe(pid) for pid in self.find_processes().all_of_jobs()]

    def close(self) -> None:
        """Ask the control plane to end; jobs are the caller's business."""
        with self._lock:
            self._is_closing = True
            if self._server is not None and self._server.poll() is None:
                self._server.terminate()
                self._server.wait(30)
