"""A real Slurm on loopback: munged, slurmctld, a few slurmd, slurmrestd, without systemd.

Tuned in its favour (it schedules at once instead of every few seconds). Needs root and Debian's packages.
Everything lives in one folder; only processes whose pid files are in it are stopped.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import http_load
from benchmarks.processes import (
    BenchmarkError,
    Usage,
    answers,
    call,
    descendants,
    free_ports,
    is_gone,
    spawn,
    stop,
    usage,
    wait_until,
)

SBIN = "/usr/sbin"
REST = "v0.0.38"
SUBMIT = f"/slurm/{REST}/job/submit"
FOLDERS = {"etc": 0o755, "run": 0o1777, "log": 0o755, "state": 0o700, "spool": 0o755, "munge": 0o700}
PROGRAMS = ("munged", "slurmctld", "slurmd", "slurmrestd", "sbatch", "setpriv")

CONF = """\
ClusterName=bench
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={home}/run/munge.sock
AuthAltTypes=auth/jwt
AuthAltParameters=jwt_key={home}/etc/jwt.key
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/run/slurmctld.pid
SlurmdPidFile={home}/run/%n.pid
SlurmctldLogFile={home}/log/slurmctld.log
SlurmdLogFile={home}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_max_time=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MaxJobCount=200000
MailProg=/bin/true
NodeName=n[0-{last_node}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=8 State=UNKNOWN
{idle_nodes}
PartitionName=main Nodes=n[0-{last_node}] Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Return why Slurm cannot be started here; None if it can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:{SBIN}")]
    if absent:
        return f"not installed: {' '.join(absent)}; type `scripts/setup bench` as root"
    return None if os.geteuid() == 0 else "several slurmd on one machine need root"


class Slurm:
    """A cluster of `num_nodes` nodes that run jobs, and `num_idle` nodes that are only configured."""

    def __init__(self, *, num_nodes: int = 2, num_idle: int = 0) -> None:
        if why := missing():
            raise BenchmarkError(why)
        self.home = Path(tempfile.mkdtemp(prefix="shoal-bench-slurm-"))
        self.num_nodes = num_nodes
        self.num_idle = num_idle
        self.env = {
            "PATH": f"{os.environ['PATH']}:{SBIN}",
            "SLURM_CONF": str(self.home / "etc/slurm.conf"),
            "HOME": str(self.home / "run"),
            "LANG": "C.UTF-8",
        }
        self.rest_port = 0
        self._rest_pid: int | None = None

    def __enter__(self) -> Self:
        try:
            self._configure()
            self._start_munged()
            self.start_controller()
            for index in range(self.num_nodes):
                self._call("slurmd", "-N", f"n{index}")
            wait_until(self._all_idle, 60, "all Slurm nodes idle")
            self._start_rest()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _configure(self) -> None:
        for name, mode in FOLDERS.items():
            (self.home / name).mkdir()
            (self.home / name).chmod(mode)
        self.home.chmod(0o755)
        (self.home / "log/munged.log").touch()
        key = self.home / "munge/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        for path in (self.home / "munge", key, self.home / "log/munged.log"):
            shutil.chown(path, "munge", "munge")
        (self.home / "etc/jwt.key").write_bytes(os.urandom(32))
        (self.home / "etc/jwt.key").chmod(0o600)
        control_port, self.rest_port = free_ports(2)
        first_port = _port_block(self.num_nodes + 1)
        conf = CONF.format(
            home=self.home,
            host=socket.gethostname().split(".")[0],
            control_port=control_port,
            last_node=self.num_nodes - 1,
            ports=f"{first_port}-{first_port + self.num_nodes - 1}",
            idle_nodes=self._idle_nodes(first_port + self.num_nodes),
        )
        (self.home / "etc/slurm.conf").write_text(conf)
        (self.home / "etc/cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    def _idle_nodes(self, port: int) -> str:
        """Nodes that slurmctld keeps in its tables and never reaches."""
        if not self.num_idle:
            return ""
        return f"NodeName=idle[0-{self.num_idle - 1}] NodeAddr=127.0.0.1 Port={port} CPUs=64 State=DOWN"

    def _start_munged(self) -> None:
        run, munge = self.home / "run", self.home / "munge"
        call(
            [
                "setpriv", "--reuid", "munge", "--regid", "munge", "--init-groups",
                f"{SBIN}/munged", "--force", "--key-file", munge / "key", "--socket", run / "munge.sock",
                "--pid-file", run / "munged.pid", "--log-file", self.home / "log/munged.log",
                "--seed-file", munge / "seed", "--num-threads", "2",
            ],
            env=self.env,
        )  # fmt: skip
        wait_until((run / "munge.sock").exists, 10, "munged's socket")

    def start_controller(self) -> None:
        self._call("slurmctld", "-i")
        wait_until(lambda: self._quiet("scontrol", "ping") == 0, 30, "slurmctld's answer")

    def kill_controller(self) -> None:
        """Send SIGKILL, like a crash or a power cut."""
        pid = self.controller_pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), 10, "slurmctld's end")
        (self.home / "run/slurmctld.pid").unlink(missing_ok=True)

    def _start_rest(self) -> None:
        # slurmrestd refuses to run as root or as SlurmUser.
        command = [
            "setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", f"{SBIN}/slurmrestd",
            "-a", "rest_auth/jwt", "-s", f"openapi/{REST}", "-t", "8", f"127.0.0.1:{self.rest_port}",
        ]  # fmt: skip
        process = spawn(command, log=self.home / "log/slurmrestd.log", env=self.env | {"SLURM_JWT": "daemon"})
        self._rest_pid = process.pid
        wait_until(lambda: answers(self.rest_port), 20, "slurmrestd's port")

    @property
    def controller_pid(self) -> int:
        return int((self.home / "run/slurmctld.pid").read_text())

    def _all_idle(self) -> bool:
        shown = self._call("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return len(set(shown.split())) >= self.num_nodes

    def _call(self, *command: str | Path) -> str:
        return call(command, env=self.env)

    def _quiet(self, *command: str) -> int:
        return subprocess.run(command, env=self.env, capture_output=True, timeout=30, check=False).returncode

    def sbatch_command(self, script: str, *options: str) -> list[str]:
        """The command line whose run time is measured; the script is one shell line."""
        return ["sbatch", "--parsable", "-o", "/dev/null", "-D", "/tmp", *options, "--wrap", script]

    def sbatch(self, script: str, *options: str) -> int:
        return int(self._call(*self.sbatch_command(script, *options)).strip())

    def num_queued(self) -> int:
        return len(self._call("squeue", "-h", "-o", "%i").split())

    @contextmanager
    def rest(self) -> Iterator[SlurmRest]:
        """Open one keep-alive connection to slurmrestd, as root."""
        token = self._call("scontrol", "token", "lifespan=3600").strip().partition("=")[2]
        connection = http.client.HTTPConnection("127.0.0.1", self.rest_port, timeout=60)
        try:
            yield SlurmRest(connection, token)
        finally:
            connection.close()

    def close(self) -> None:
        """Stop everything this cluster started, steps of its jobs included, and remove its folder."""
        pids = [int(path.read_text()) for path in (self.home / "run").glob("*.pid") if path.stat().st_size]
        pids += [self._rest_pid] if self._rest_pid else []
        steps = self._steps()
        stop([*steps, *(descendants(steps) - set(steps))], grace_s=2)
        stop(pids)
        shutil.rmtree(self.home, ignore_errors=True)

    def _steps(self) -> list[int]:
        """Every slurmstepd of this cluster: each detaches itself, and has this cluster's node log open."""
        pids = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "comm").read_text().strip() == "slurmstepd":
                    opened = [descriptor.readlink() for descriptor in (entry / "fd").iterdir()]
                    if any(path.is_relative_to(self.home / "log") for path in opened):
                        pids.append(int(entry.name))
            except OSError:
                continue  # it ended while we looked
        return pids

    def controller_usage(self) -> Usage:
        return usage([self.controller_pid])

    def server_usage(self) -> Usage:
        """Usage of slurmctld and slurmrestd together: what one submit over REST costs."""
        return usage([self.controller_pid, *([self._rest_pid] if self._rest_pid else [])])


class SlurmRest:
    """slurmrestd over one connection."""

    def __init__(self, connection: http.client.HTTPConnection, token: str) -> None:
        self._connection = connection
        self._headers = {
            "X-SLURM-USER-NAME": "root",
            "X-SLURM-USER-TOKEN": token,
            "Content-Type": "application/json",
        }

    def submit(self, script: str, **fields: Any) -> int:
        """Submit and return the job's id, once slurmrestd has answered."""
        self._connection.request("POST", SUBMIT, self._body(script, fields), self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        if answer.status != 200:
            raise BenchmarkError(f"slurmrestd answered {answer.status}: {text[:500]!r}")
        return int(json.loads(text)["job_id"])

    def submit_request(self, script: str, **fields: Any) -> http_load.Render:
        """The same as prepared bytes."""
        prepared = http_load.request("POST", SUBMIT, self._headers, self._body(script, fields).encode())
        return lambda _: prepared

    def get_request(self, noun: str) -> http_load.Render:
        prepared = http_load.request("GET", f"/slurm/{REST}/{noun}", self._headers)
        return lambda _: prepared

    def _body(self, script: str, fields: dict[str, Any]) -> str:
        job = {
            "name": "bench",
            "current_working_directory": "/tmp",
            "standard_output": "/dev/null",
            "environment": {"PATH": "/bin:/usr/bin"},
            **fields,
        }
        return json.dumps({"script": f"#!/bin/bash\n{script}\n", "job": job})


def _port_block(count: int) -> int:
    """Return the first of `count` neighbouring free ports, because Slurm takes node ports as one range."""
    for first in range(23000, 29000, count + 1):
        if not any(answers(port) for port in range(first, first + count)):
            return first
    raise BenchmarkError("no block of free ports between 23000 and 29000")
