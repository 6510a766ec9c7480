"""Starts the bridge to Ray and asks it. No other file of this engine starts processes here.

Ray's API blocks, and a driver that loses its cluster ends itself. So it lives in a process of its own,
which is started for the first question, killed when it does not reply, and started again for the next
question.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as Late
from pathlib import Path
from typing import Any

from shoal import bounded_file
from shoal.clock import Clock, SystemClock
from shoal.engines.ray import agent
from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.parse import UNREACHED, connection_error
from shoal.engines.ray.render import ray_environment, tls_environment
from shoal.errors import EngineUnreachable, ShoalError

START_S = 120.0
"""Time for `import ray` and to find the cluster: one second, and much more on a busy machine."""
WITHIN_S = 5.0
"""How long agents have to reply; late ones are named in the result."""
START_KEEPERS_S = 30.0
SLACK_S = 15.0
"""How much later the bridge itself may reply before it is killed."""
AGAIN_S = 2.0
"""How long a question waits for a Ray that was there before and has gone away."""
MAX_ERRORS = 5
"""Error replies in a row after which the bridge is replaced: it has lost its Ray for good."""
WORDS = 20_000
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 15.0
"""Pause between starts of bridges that fail."""
BRIDGE = Path(agent.__file__).with_name("bridge.py")


class RayClient:
    """Asks Ray through the bridge. Blocking; safe to use from threads. `EngineUnreachable`: Ray was not
    reached.

    The first caller waits until Ray is found, or for `patience_s`. Later, while Ray is away, no caller
    waits long: a thread starts bridges again and again, and every question in the meantime fails at once.
    """

    def __init__(
        self,
        config: RayConfig,
        *,
        namespace: str,
        log_file: Path,
        find: Callable[[], tuple[str, Path]],
        is_passing: bool = False,
        patience_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Create the client.

        `find` returns the address and the token file, once before each start of a bridge; it may start a
        Ray. `is_passing`: agents that it creates end with it. `patience_s`: how long the first question
        waits.
        """
        self._config = config
        self._namespace = namespace
        self._log_file = log_file
        self._find = find
        self._is_passing = is_passing
        self._patience_s = patience_s
        self._clock = clock or SystemClock()
        self._guard = threading.Lock()
        self._bridge: _BridgeProcess | None = None
        self._draft: _BridgeProcess | None = None
        """A bridge that is not connected."""
        self._starting: Future[_BridgeProcess] | None = None
        self._has_connected = self._is_closed = False
        self._not_before, self._pause_s, self._last_error = 0.0, FIRST_PAUSE_S, ""

    def nodes(self) -> dict[str, Any]:
        return self._ask("nodes", {})

    def start(self, starts: list[dict[str, Any]]) -> dict[str, Any]:
        return self._ask("start", {"starts": starts}, START_KEEPERS_S)

    def look(self, keys: dict[str, list[str]]) -> dict[str, Any]:
        return self._ask("look", {"keys": keys})

    def end(self, keys: dict[str, list[str]]) -> dict[str, Any]:
        return self._ask("end", {"keys": keys})

    def dismiss(self) -> dict[str, Any]:
        return self._ask("dismiss", {})

    def version(self) -> dict[str, str]:
        """Return the version of Ray and of its Python."""
        return self._running().version

    def close(self) -> None:
        """End the bridge. May be repeated. Agents stay, unless `is_passing`."""
        with self._guard:
            self._is_closed = True
            starting = self._starting
            for bridge in (self._bridge, self._draft):
                if bridge is not None:
                    bridge.kill()
            self._bridge = None
        if starting is not None:
            wait([starting])

    def _ask(self, verb: str, args: dict[str, Any], within_s: float | None = None) -> dict[str, Any]:
        bridge = self._running()
        try:
            return bridge.ask(verb, args, WITHIN_S if within_s is None else within_s)
        except EngineUnreachable:
            with self._guard:
                if bridge.is_broken and self._bridge is bridge:
                    bridge.kill()
                    self._bridge = None
            raise

    def _running(self) -> _BridgeProcess:
        with self._guard:
            if self._bridge is not None and not self._bridge.is_broken:
                return self._bridge
            if self._bridge is not None:
                self._bridge.kill()
                self._bridge = None
            if self._starting is None:
                if self._is_closed or self._clock.monotonic() < self._not_before:
                    raise EngineUnreachable(self._last_error or "closed", hint="shoal doctor")
                self._starting = Future()
                threading.Thread(target=self._connect, args=(self._starting,), daemon=True).start()
            starting, patience_s = self._starting, AGAIN_S if self._has_connected else self._patience_s
        try:
            return starting.result(patience_s)
        except Late:
            raise EngineUnreachable(
                f"Ray is being looked for: {self._last_error}", hint="shoal doctor"
            ) from None

    def _connect(self, starting: Future[_BridgeProcess]) -> None:
        """Start a bridge, on its own thread, once at a time."""
        try:
            bridge = self._start()
        except BaseException as error:  # noqa: BLE001 - reported to the callers that wait
            with self._guard:
                self._last_error = error.message if isinstance(error, ShoalError) else str(error)
                self._not_before = self._clock.monotonic() + self._pause_s
                self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)
                self._starting = self._draft = None
            starting.set_exception(error)
            return
        with self._guard:
            self._bridge, self._draft, self._starting = bridge, None, None
            self._has_connected, self._pause_s, self._last_error = True, FIRST_PAUSE_S, "it has gone away"
            if self._is_closed:
                bridge.kill()
        starting.set_result(bridge)

    def _start(self) -> _BridgeProcess:
        address, token_file = self._find()
        setup = {
            "address": address,
            "namespace": self._namespace,
            "agent": agent.__file__,
            "root": self._config.spool,
            "lifetime": None if self._is_passing else "detached",
        }
        env = ray_environment(os.environ, token_file, is_own=not self._config.address)
        env |= tls_environment(self._config)
        with self._guard:
            if self._is_closed:
                raise EngineUnreachable("closed")
            bridge = _BridgeProcess([self._config.ray_python, "-P", "-s", str(BRIDGE)], env, self._log_file)
            self._draft = bridge
        try:
            bridge.connect(setup, address)
        except BaseException:
            bridge.kill()
            raise
        return bridge


class _BridgeProcess:
    """One process of the bridge."""

    def __init__(self, command: list[str], env: dict[str, str], log_file: Path) -> None:
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._log_file = log_file
        try:
            with log_file.open("wb") as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=env,
                    cwd="/",
                    start_new_session=True,  # a Ctrl-C at the terminal must not reach it
                )
        except OSError as error:
            raise EngineUnreachable(
                f"{command[0]} cannot be started: {error.strerror or error}",
                hint="name a Python with Ray in it: `shoal connect ray --ray-python PATH`",
            ) from error
        self.version: dict[str, str] = {}
        self.is_broken = False
        self._guard, self._writing = threading.Lock(), threading.Lock()
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._number = self._num_errors = 0
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._reader = threading.Thread(target=self._read, name="ray-bridge", daemon=True)

    def connect(self, setup: dict[str, Any], address: str) -> None:
        first: Future[dict[str, Any]] = Future()
        self._waiting[0] = first
        self._reader.start()
        self._write(setup)
        try:
            message = first.result(START_S)
        except Late:
            raise EngineUnreachable(
                f"the Ray at {address} did not answer within {START_S:g} s", hint=UNREACHED
            ) from None
        if "failed" in message:
            raise connection_error(message["failed"], address, self._log_tail())
        self.version = message["ready"]

    def ask(self, verb: str, args: dict[str, Any], within_s: float) -> dict[str, Any]:
        waiting: Future[dict[str, Any]] = Future()
        with self._guard:
            self._number += 1
            number = self._number
            self._waiting[number] = waiting
        self._write({"id": number, "verb": verb, "within_s": within_s, "args": args})
        try:
            message = waiting.result(within_s + SLACK_S)
        except Late:
            self.is_broken = True
            raise EngineUnreachable(
                f"Ray did not answer `{verb}` within {within_s + SLACK_S:g} s", hint="shoal doctor"
            ) from None
        if "error" in message:
            self._num_errors += 1
            self.is_broken = self.is_broken or self._num_errors >= MAX_ERRORS
            raise EngineUnreachable(f"Ray could not be asked: {message['error']}", hint="shoal doctor")
        self._num_errors = 0
        reply: dict[str, Any] = message["told"]
        return reply

    def kill(self) -> None:
        """Kill it and wait, so that it does not overlap with its successor."""
        self.is_broken = True
        self._process.kill()
        self._process.wait()
        if self._reader.is_alive():
            self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unwritten data is no loss
                    pipe.close()

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        left = memoryview(json.dumps(message).encode() + b"\n")
        try:
            with self._writing:
                pipe = self._process.stdin.fileno()
                while left and not self.is_broken:
                    # A stopped process takes no more than a pipe holds, and we must not wait for it for
                    # ever.
                    if not select.select([], [pipe], [], SLACK_S)[1]:
                        self.is_broken = True
                    with contextlib.suppress(BlockingIOError):
                        left = left[os.write(pipe, left) :]
        except (OSError, ValueError):
            self.is_broken = True  # the reader tells the callers

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # half a line or a closed pipe: it has ended
            for line in self._process.stdout:
                message = json.loads(line)
                with self._guard:
                    waiting = self._waiting.pop(message.get("id", 0), None)
                if waiting is not None:
                    waiting.set_result(message)
        self.is_broken = True
        with self._guard:
            left, self._waiting = list(self._waiting.values()), {}
        message = {"error": f"the bridge ended: {self._last_words()}"}
        for waiting in left:
            waiting.set_result({**message, "failed": message["error"]})

    def _log_tail(self) -> str:
        return bounded_file.read_end(self._log_file, WORDS).decode("utf-8", "replace")

    def _last_words(self) -> str:
        lines = self._log_tail().strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"
