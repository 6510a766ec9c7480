"""A real Slurm on this machine: munge, slurmctld, and a slurmd for each node in a network of its own.

Made of Debian's packages (`scripts/setup engines`), as root, without systemd; of another Debian's where
`slurm_root` is told of one. A node can be killed, cut off
from the control plane, from its peers, or from both, and healed. Everything lies below one folder; everything
that was started is ended by `down`, by pid and by network namespace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.support.host.cluster_lab import POLL_S, ClusterLab
from tests.support.host.processes import PATH, is_alive
from tests.support.slurm.daemons import SlurmAccounting, SlurmRestServer
from tests.support.slurm.other_version import SlurmRoot, chosen_root

NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
SLURM_PROGRAMS = ("slurmd", "slurmstepd", "srun")
SLURMD_PORT = 26818
CLEAR_S = 20.0
"""How long jobs that were cancelled may take to be over."""


class SlurmShape(NamedTuple):
    """How large it is. All of it is made up: Slurm believes its configuration."""

    nodes: int = 3
    cpus: int = 4
    memory_mb: int = 8000
    gpus: int = 2
    kinds_of_gpu: tuple[str, ...] = ("h100",)
    """Of each node's GPUs: as many of the first as of the others."""
    other_gres: tuple[str, ...] = ()
    """What else is counted on each node: two of each."""
    slurmd_timeout_s: int = 5
    """A node that is silent for so long has failed, for Slurm, which ends its jobs when it is back. Its own
    default is 300."""
    proctrack: str = "cgroup"
    """How it knows what is of a job, and whom it sends signals: `cgroup` those whom it started, `linuxproc`
    all, but for those whose parents are gone."""
    unkillable_s: int = 60
    """How long processes may take to die before Slurm gives them up, and drains their node; Slurm's own."""
    min_job_age_s: int = 300
    """For how long `squeue` remembers what is over, about."""
    has_accounting: bool = False
    """With a slurmdbd."""
    has_rest: bool = False
    """With a slurmrestd."""
    partitions: tuple[str, ...] = ("main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",)
    """As they are written in slurm.conf, behind their `PartitionName=`."""
    settings: tuple[str, ...] = ()
    """Further lines of slurm.conf."""
    switches: tuple[str, ...] = ("leaf Nodes=ALL",)
    """As in topology.conf, likewise."""


def what_is_missing() -> str | None:
    """Why there can be no Slurm here, and what to do; None: there can."""
    if os.getuid() != 0:
        return "a Slurm of one's own needs root: `sudo make test-engines`"
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(missing)} here: `scripts/setup engines` installs them" if missing else None


class SlurmLab(ClusterLab):
    engine = "slurm"

    def __init__(self, root: Path, shape: SlurmShape = SlurmShape()) -> None:  # noqa: B008
        self.root = root
        self._saved = root / "saved"
        """What slurmctld had on disk at `until_saved`."""
        self.shape = shape
        super().__init__(tuple(f"n{number}" for number in range(shape.nodes)))
        other = chosen_root()
        self.other_root = SlurmRoot(other, root / "bin", self.mark) if other is not None else None
        self.environment = {
            **os.environ,
            **self.mark,
            "PATH": PATH if other is None else f"{root / 'bin'}:{PATH}",
            "SLURM_CONF": str(root / "etc" / "slurm.conf"),
        }
        self.variables = {name: self.environment[name] for name in ("SLURM_CONF", "PATH")}
        # slurmctld and slurmdbd listen at every address: each lab needs three ports of its own.
        self._port = 26000 + self.number * 3
        self.rest = (
            SlurmRestServer(
                root,
                self._port + 2,
                self.environment,
                self.other_root,
                has_accounting=shape.has_accounting,
            )
            if shape.has_rest
            else None
        )
        rest_lines = self.rest.slurm_conf_lines if self.rest is not None else []
        self.accounting = (
            SlurmAccounting(root, self._port + 1, self.environment, rest_lines)
            if shape.has_accounting
            else None
        )

    def up(self) -> None:
        for name in ("etc", "run", "log", "state", "spool", "dev", "munge"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o755)
        (self.root / "run").chmod(0o1777)
        if self.other_root is not None:
            self.other_root.up()
        self._write_files()
        self._start_munge()
        if self.accounting is not None:
            self.accounting.up()
        self.make_network()
        self.start_controller()
        if self.rest is not None:
            self.rest.up()
        with ThreadPoolExecutor() as starters:
            list(starters.map(self.start_node, self.names))
        self.until(lambda: len(self.usable_nodes()) == len(self.names), "every node is idle")

    def reset(self) -> None:
        """No job is left, no node is cut off, and each takes work."""
        self.run("scancel", "--quiet", "--partition=main")
        for name in self.names:
            self.heal(name)
        deadline = time.monotonic() + CLEAR_S
        while self.run("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.5)
        for state in ("DOWN", "RESUME") if self.run("squeue", "-h").strip() else ():
            # Slurm asks a node that was away for minutes whether a job is over there, unless that is down.
            self.run(
                "scontrol", "update", f"NodeName={','.join(self.names)}", f"State={state}", "Reason=cleared"
            )
        self.until(lambda: not self.run("squeue", "-h").strip(), "no job is left")
        for name in self.names:
            self.resume(name)

    def down(self) -> None:
        for name in self.names:
            self.crash_node(name)
        if self.rest is not None:
            self.rest.down()
        self._end("slurmctld")
        if self.accounting is not None:
            self.accounting.down()
        self._end("munged")
        if self.other_root is not None:
            self.other_root.down()
        self.remove_network()

    @property
    def nodes_python(self) -> str:
        return sys.executable if self.other_root is None else self.other_root.python

    def run(self, *command: str, stdin: str = "") -> str:
        """A command of Slurm's, as on a login node."""
        done = subprocess.run(
            command, env=self.environment, input=stdin, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def cancel(self, *names: str) -> None:
        """Jobs of these names, if there are any."""
        for name in names:
            self.run("scancel", "--quiet", f"--name={name}")

    def fill(self, *nodes: str) -> None:
        """Somebody else's job on each of them, `filler`, which leaves at most one CPU."""
        for node in nodes:
            arguments = ("--job-name=filler", f"--nodelist={node}", f"--cpus-per-task={self.shape.cpus - 1}")
            self.run("sbatch", *arguments, "--output=/dev/null", "--wrap=sleep 600")

    def resume(self, name: str) -> None:
        """As an administrator does, until it takes work: Slurm may drain it once more meanwhile, or notice
        only now that it was away for too long.
        """

        def is_resumed() -> bool:
            state = self.run("sinfo", "-h", "-N", "-n", name, "-o", "%T")
            if "drain" in state or "down" in state:
                # Refused where the node has become well since `sinfo`: the next look shows it.
                resume = ("scontrol", "update", f"NodeName={name}", "State=RESUME")
                subprocess.run(resume, env=self.environment, capture_output=True, check=False)
            return name in self.usable_nodes()

        self.until(is_resumed, f"{name} takes work")

    def last_logs(self) -> str:
        files = sorted((self.root / "log").glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-1500:]}" for f in files)

    def start_controller(self) -> None:
        self._check(["slurmctld", "-i"])
        self.until(self._answers, "slurmctld answers")

    def until_saved(self) -> None:
        """slurmctld has written down what it knows now, which it does every five seconds if there is news."""
        file, asked_at = self.root / "state" / "job_state", time.time()
        self.run("sbatch", "--job-name=news", "--hold", "--output=/dev/null", "--wrap=true")
        self.until(lambda: file.exists() and file.stat().st_mtime > asked_at, "slurmctld saves its state")
        self.cancel("news")
        shutil.rmtree(self._saved, ignore_errors=True)
        shutil.copytree(self.root / "state", self._saved)

    def kill_controller(self, *, loses_state: bool = False) -> None:
        """As by `kill -9`. `is_forgetful`: within five seconds of `until_saved`, however long it took."""
        self._end("slurmctld", signal.SIGKILL)
        if loses_state:
            shutil.rmtree(self.root / "state")
            shutil.copytree(self._saved, self.root / "state")

    def start_node(self, name: str) -> None:
        """Its slurmd, in the node's network and with the node's own name."""
        inside = 'hostname "$0"; exec "$@"'
        daemon = ["slurmd", "-N", name, "-f", self.environment["SLURM_CONF"]]
        self._check([*self.netns_command(name), "unshare", "--uts", "sh", "-c", inside, name, *daemon])

    def kill_daemon(self, name: str) -> None:
        self._end(name, signal.SIGKILL)

    def crash_node(self, name: str) -> None:
        self.kill_all_on(name)
        (self.root / "run" / f"{name}.pid").unlink(missing_ok=True)

    def report_crash(self, name: str) -> None:
        self.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=crashed")

    def is_cluster_process(self, pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip() in SLURM_PROGRAMS
        except OSError:
            return True  # gone: listens at nothing

    def connect_options(self) -> tuple[str, ...]:
        return ()

    def _check(self, command: list[str]) -> None:
        with (self.root / "log" / "starts.log").open("ab") as log:
            subprocess.run(command, env=self.environment, check=True, stdout=log, stderr=log, cwd="/")

    def _answers(self) -> bool:
        done = subprocess.run(["scontrol", "ping"], env=self.environment, capture_output=True, check=False)
        return b"is UP" in done.stdout

    def usable_nodes(self) -> set[str]:
        """The nodes that take work and answer: sinfo lists one that does not as `idle*`."""
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-t", "idle,mix,alloc", "-o", "%N %T"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        nodes = [line.split() for line in done.stdout.splitlines()]
        return {name for name, state in nodes if not state.endswith("*")}

    def _end(self, name: str, number: int = signal.SIGTERM) -> None:
        path = self.root / "run" / f"{name}.pid"
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            os.kill(pid, number)
            deadline = time.monotonic() + 10
            while is_alive(pid) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        path.unlink(missing_ok=True)

    def _start_munge(self) -> None:
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (self.root / "munge").chmod(0o700)
        files = {name: str(self.root / place) for name, place in MUNGE_FILES.items()}
        self._check(["munged", "--force", *(f"--{name}={path}" for name, path in files.items())])

    def _write_files(self) -> None:
        for number in range(self.shape.gpus):
            device = self.root / "dev" / f"gpu{number}"
            if not device.exists():
                os.mknod(
                    device, 0o666 | 0o020000, os.makedev(240, number)
                )  # of the local range: opens nothing
        host = os.uname().nodename.split(".")[0]
        lines = [
            line.format(
                root=self.root,
                host=host,
                address=self.address,
                port=self._port,
                slurmd_port=SLURMD_PORT,
                # Control groups are named after node and job: no two labs may have the same.
                first_job_id=(self.number + 1) * 100_000,
                slurmd_timeout_s=self.shape.slurmd_timeout_s,
                unkillable_s=self.shape.unkillable_s,
                tracks_by=self.shape.proctrack,
                min_job_age_s=self.shape.min_job_age_s,
                gres_types=",".join(("gpu", *self.shape.other_gres)),
            )
            for line in CONF.splitlines()
        ]
        each = self.shape.gpus // len(self.shape.kinds_of_gpu)
        gres = ",".join(
            [
                *(f"gpu:{kind}:{each}" for kind in self.shape.kinds_of_gpu),
                *(f"{name}:2" for name in self.shape.other_gres),
            ]
        )
        lines += [
            (
                f"NodeName={name} NodeHostname={name} NodeAddr={self.address_of(name)} Port={SLURMD_PORT} "
                f"CPUs={self.shape.cpus} RealMemory={self.shape.memory_mb} Gres={gres} "
                "Feature=fast State=UNKNOWN"
            )
            for name in self.names
        ]
        if self.accounting is not None:
            lines += self.accounting.slurm_conf_lines
        if self.rest is not None:
            self.rest.write_key()
            lines += self.rest.slurm_conf_lines
        lines += [*self.shape.settings, *(f"PartitionName={switch}" for switch in self.shape.partitions)]
        (self.root / "etc" / "slurm.conf").write_text("\n".join(lines) + "\n")
        devices = [
            f"NodeName=n[0-{self.shape.nodes - 1}] Name=gpu Type={kind} "
            f"File={self.root}/dev/gpu[{place * each}-{(place + 1) * each - 1}]\n"
            for place, kind in enumerate(self.shape.kinds_of_gpu)
        ]
        devices += [
            f"NodeName=n[0-{self.shape.nodes - 1}] Name={name} Count=2\n" for name in self.shape.other_gres
        ]
        (self.root / "etc" / "gres.conf").write_text("".join(devices))
        (self.root / "etc" / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        everyone = f"Nodes=n[0-{self.shape.nodes - 1}]"
        switches = [f"SwitchName={switch}\n".replace("Nodes=ALL", everyone) for switch in self.shape.switches]
        (self.root / "etc" / "topology.conf").write_text("".join(switches))


MUNGE_FILES = {
    "key-file": "munge/key",
    "socket": "run/munge.sock",
    "pid-file": "run/munged.pid",
    "log-file": "log/munged.log",
    "seed-file": "munge/seed",
}
CONF = """ClusterName=lab
SlurmctldHost={host}({address})
SlurmctldPort={port}
SlurmdPort={slurmd_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.sock,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/%n.log
ProctrackType=proctrack/{tracks_by}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
TopologyPlugin=topology/tree
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
SlurmctldTimeout=30
MessageTimeout=5
BatchStartTimeout=5
InactiveLimit=0
KillWait=2
UnkillableStepTimeout={unkillable_s}
MinJobAge={min_job_age_s}
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes={gres_types}
MaxJobCount=100000
FirstJobId={first_job_id}
MailProg=/bin/true"""


@contextlib.contextmanager
def slurm_lab(root: Path, shape: SlurmShape = SlurmShape()) -> Iterator[SlurmLab]:  # noqa: B008
    """One that is up, and wholly gone afterwards."""
    lab = SlurmLab(root, shape)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()
