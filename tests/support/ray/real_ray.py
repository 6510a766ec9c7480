"""A real Ray on this machine: a head, and a raylet for each node in a network of its own.

Ray is in an environment of its own below .cache (`scripts/setup engines`), as on a site where it is somebody
else's. As root. A raylet, an agent, the head, a whole node can be killed, a node cut off. Everything that was
started is ended by `down`, by session and by network namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shoal.engines.ray.client import BRIDGE
from shoal.engines.ray.head import free_ports
from shoal.engines.ray.render import AGENT_PORTS, HEAD_PORTS, ray_environment
from tests.support.host.cluster_lab import POLL_S, ClusterLab
from tests.support.host.processes import PATH, is_alive, until_dead
from tests.support.ray.tls import RayTls

ROOT = Path(__file__).parents[3]
RAY_PYTHON = Path(os.environ.get("SHOAL_TEST_RAY_PYTHON", ROOT / ".cache" / "ray" / "bin" / "python"))
RAYLET = "raylet/raylet"
FIRST_AGENT_PORT = 26380
START_S = 120.0
NICE = ("nice", "-n", "-10")
"""Before others: on a busy machine what has not begun within 30 s gives itself up, and nothing sets that."""
TRIES = 5
QUIET = ("--disable-usage-stats", "--include-log-monitor=false")
CHECKS, PERIOD_S = 3, 2.0
TUNED_VARIABLES = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": f"{PERIOD_S * 1000:.0f}",
    "RAY_health_check_failure_threshold": str(CHECKS),
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
    "RAY_gcs_storage": "rocksdb",
    "RAY_raylet_start_wait_time_s": "120",
}
"""A node that refuses is called dead within seconds; what the head knows is on disk."""
LOST_AFTER_S = 36.0
"""How long a node may be cut off until Ray calls it dead."""


def what_is_missing() -> str | None:
    """Why there can be no Ray here, and what to do; None: there can."""
    if os.getuid() != 0:
        return "nodes with networks of their own need root: `sudo make test-engines`"
    if shutil.which("ip", path=PATH) is None:
        return "no ip here: `scripts/setup engines` installs it"
    return None if RAY_PYTHON.exists() else f"no {RAY_PYTHON}: `scripts/setup engines` makes it"


class RayLab(ClusterLab):
    engine = "ray"
    start_s = START_S

    def __init__(
        self,
        root: Path,
        num_nodes: int = 2,
        *,
        has_job_server: bool = False,
        has_tls: bool = False,
        has_tokens: bool = True,
        has_storage: bool = True,
        lost_after_s: float = LOST_AFTER_S,
        python: Path = RAY_PYTHON,
    ) -> None:
        super().__init__(tuple(f"n{number}" for number in range(num_nodes)), kind=1)
        self.root = root
        self.temp = Path(tempfile.mkdtemp(prefix="shr-", dir="/tmp"))  # short: Ray has sockets below it
        self.token_file = root / "token"
        # Others may have a Ray here.
        self._port, self._dashboard_port, *self._head_ports = free_ports(2 + len(HEAD_PORTS))
        self.head_address = f"{self.address}:{self._port}"
        self.has_job_server = has_job_server
        self.python = python
        self._has_tokens = has_tokens
        self._has_storage = has_storage
        self._check_s = lost_after_s / CHECKS - PERIOD_S
        self.jobs_url = f"http://{self.address}:{self._dashboard_port}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.variables = {}
        self.tls = RayTls(root / "tls") if has_tls else None

    def up(self) -> None:
        self.token_file.write_text(os.urandom(24).hex())
        self.token_file.chmod(0o600)
        if self.tls is not None:
            self.tls.make({"127.0.0.1", "localhost", self.address, *map(self.address_of, self.names)})
        self.make_network()
        self.start_head()
        self._start_nodes(self.names)

    def down(self) -> None:
        for name in self.names:
            self.crash_node(name)
        self.kill_head()
        self.remove_network()
        shutil.rmtree(self.temp, ignore_errors=True)

    def start_head(self) -> None:
        arguments = ["--head", f"--port={self._port}", f"--node-ip-address={self.address}", "--num-cpus=0"]
        arguments += ["--node-name=head", "--no-monitor", f"--temp-dir={self.temp}"]
        arguments += [f"--include-dashboard={str(self.has_job_server).lower()}"]
        arguments += [f"--dashboard-host={self.address}", f"--dashboard-port={self._dashboard_port}"]
        (self.temp / "ray_current_cluster").unlink(missing_ok=True)
        arguments += [f"--{name}={port}" for name, port in zip(HEAD_PORTS, self._head_ports, strict=True)]
        self._start("head", [], arguments)

    def start_node(self, name: str) -> None:
        """Its raylet, in the node's network and with the node's own host name."""
        self.stop_ray_on(name)
        arguments = [f"--address={self.head_address}", f"--node-ip-address={self.address_of(name)}"]
        arguments += [f"--node-name={name}", "--num-cpus=4", "--num-gpus=2", "--labels=rack=leaf"]
        arguments += [f"--temp-dir={self.temp / name}"]  # two that begin at once would take the same sockets
        before = [*self.netns_command(name), "unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', name]
        self._start(name, before, [*arguments, *self._agent_ports()])

    def kill_head(self) -> None:
        """As by `kill -9` of all its processes; agents that ran beside it among them."""
        self._kill_session("head")

    def kill_daemon(self, name: str) -> None:
        """The raylet."""
        pids = [pid for pid in self.pids_on(name) if RAYLET in command_of(pid).split(" ")[0]]
        assert len(pids) == 1, [command_of(pid) for pid in self.pids_on(name)]
        os.kill(pids[0], signal.SIGKILL)

    def stop_ray_on(self, name: str) -> None:
        """All of Ray on a node, and nothing that Ray started for others."""
        self._kill_session(name)

    def crash_node(self, name: str) -> None:
        self.kill_all_on(name)
        self._kill_session(name)

    def report_crash(self, name: str) -> None:
        """It notices by itself."""

    def restart_daemons(self) -> None:
        """As a service manager does: a raylet that has ended is started again. One that Ray called dead while
        it was cut off ends itself when it hears of that.
        """
        self._start_nodes([name for name in self.names if not self.is_cut(name) and not self.has_ray(name)])

    def has_ray(self, name: str) -> bool:
        """Whether its raylet has not ended."""
        return name in self.started and self.started[name].poll() is None

    def _start_nodes(self, names: Iterable[str]) -> None:
        """Beside each other: each mostly waits."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(self.start_node, names))

    def is_cluster_process(self, pid: int) -> bool:
        """What Ray started, and the bridge, which is a driver of Ray's."""
        with contextlib.suppress(OSError):
            return str(BRIDGE) in command_of(pid) or os.getsid(pid) in {
                process.pid for process in self.started.values()
            }
        return True  # gone: listens at nothing

    def agents_on(self, name: str) -> list[int]:
        """Shoal's, on that node: one, or while it is being replaced none."""
        return [pid for pid in self.pids_on(name) if command_of(pid).startswith("ray::Agent")]

    def connect_options(self) -> tuple[str, ...]:
        where = ("--address", self.head_address, "--token-file", str(self.token_file))
        tls = self.tls.connect_options() if self.tls is not None else ()
        return (*where, *tls, "--ray-python", str(self.python))

    def last_logs(self) -> str:
        return "\n".join(
            f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in self.root.glob("*.log")
        )

    def _agent_ports(self) -> list[str]:
        return [f"--{name}={FIRST_AGENT_PORT + number}" for number, name in enumerate(AGENT_PORTS)]

    def ray_command(self, *arguments: str) -> list[str]:
        """One of Ray's own."""
        return [str(self.python), "-P", "-s", "-m", "ray.scripts.scripts", *arguments]

    def client_environment(self) -> dict[str, str]:
        """For `ray job submit`."""
        env = ray_environment(os.environ, self.token_file, is_own=False)
        return env | {"RAY_ADDRESS": self.jobs_url, "PATH": PATH}

    def _start(self, name: str, before: list[str], arguments: list[str]) -> None:
        """Again and again: on a busy machine Ray gives itself up too soon."""
        env = ray_environment(os.environ, self.token_file, is_own=False) | TUNED_VARIABLES
        env |= self.tls.environment() if self.tls is not None else {}
        env |= {} if self._has_tokens else {"RAY_AUTH_MODE": "disabled"}
        env |= {"RAY_health_check_timeout_ms": f"{self._check_s * 1000:.0f}"}
        env |= {"RAY_gcs_storage_path": str(self.root / "gcs"), "PATH": PATH}
        env |= {} if self._has_storage else {"RAY_gcs_storage": "memory"}
        env |= self.mark
        start = self.ray_command("start", "--block")
        arguments = [*NICE, *before, *start, *arguments, "--object-store-memory=80000000", *QUIET]
        for _ in range(TRIES):
            with (self.root / f"{name}.log").open("wb") as output:
                process = subprocess.Popen(
                    arguments, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/",
                    start_new_session=True,
                )  # fmt: skip
            self.started[name] = process
            deadline = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < deadline:
                if "Ray runtime started" in (self.root / f"{name}.log").read_text(errors="replace"):
                    return
                time.sleep(POLL_S)
            self._kill_session(name)
        raise AssertionError(f"Ray did not start {name} in {TRIES} tries\n{self.last_logs()}")

    def _kill_session(self, name: str) -> None:
        process = self.started.pop(name, None)
        if process is None:
            return
        for _ in range(3):
            pids = session_pids(process.pid)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        process.wait()
        assert until_dead(session_pids(process.pid))


def session_pids(leader_pid: int) -> list[int]:
    """The living processes of a session that began with this one."""
    result = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and os.getsid(int(entry.name)) == leader_pid
                and is_alive(int(entry.name))
            ):
                result.append(int(entry.name))
    return result


def command_of(pid: int) -> str:
    """Its words; none: it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


MakeRay = Callable[..., contextlib.AbstractContextManager["RayLab"]]
"""`ray_lab` in a folder of its own."""


@contextlib.contextmanager
def ray_lab(root: Path, num_nodes: int = 2, **more: Any) -> Iterator[RayLab]:
    """One that is up, and wholly gone afterwards."""
    lab = RayLab(root, num_nodes, **more)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()
