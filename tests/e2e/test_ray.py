"""A person on a Ray that is not theirs: connect, up, and the same job file and commands as on a laptop."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.client.handles import JobHandle
from tests.e2e.test_drills import PROGRAM
from tests.support.ray_lab import RAY_PYTHON, RayLab, ray_lab, session, what_is_missing
from tests.support.real_plane import RealPlane, until
from tests.support.service_faults import PATH, address_of, token_of
from tests.support.services import Caller, Served
from tests.support.shares import SOURCE

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
]  # with the start of a Ray, which may take its time
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install 'shoal[train]'"
)


class RayPlane(RealPlane):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._flags = ("--listen", "127.0.0.1:0", "--serve-on", "127.0.0.1:0")
        self.shared = home.parent / "shared"
        self.spool = home.parent / "spool"

    def connect(self, *words: str) -> dict[str, object]:
        fixed = ("--as-root", "--python-path", SOURCE, "--ray-python", str(RAY_PYTHON))
        places = ("--shared", str(self.shared), "--spool", str(self.spool))
        done = self.command("connect", "ray", *fixed, *places, *words, "--json", timeout_s=240.0)
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    with ray_lab(tmp_path_factory.mktemp("ray")) as lab:
        yield lab


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, lab: RayLab) -> Iterator[RayPlane]:
    real = RayPlane(tmp_path_factory.mktemp("ray-plane") / "home")
    told = real.connect("--address", lab.head_address, "--token-file", str(lab.token_file))
    assert (told["nodes"], told["gpus"], told["nodes_on"]) == (2, 4, f"{lab.address}:7464")
    real.up()
    try:
        yield real
    finally:
        real.down()


def test_a_service_on_nodes_of_ray_is_called_through_the_data_plane_here(
    plane: RayPlane, lab: RayLab, tmp_path: Path
) -> None:
    served = Served(plane, tmp_path)
    served.serve(replicas=2, resources={"gpus": 2})  # as many as a node has
    until(lambda: len(served.replicas()) == 2, "two replicas are ready", within_s=150.0)
    hosts = {address.rpartition(":")[0] for address in served.addresses()}
    assert hosts == {f"tls:{lab.address_of(name)}" for name in lab.names}
    with Caller(address_of(served), PATH, token_of(served)) as caller:
        until(lambda: sum(caller.statuses.values()) >= 100, "it answers")
    assert set(caller.statuses) == {200}
    assert plane.command("stop", "hello").returncode == 0
    until(lambda: (told := served.table()) is not None and not told.services, "it is gone")


def test_a_job_runs_on_a_node_of_ray_and_its_log_comes_back(plane: RayPlane) -> None:
    job = plane.submit("echo from $(hostname), $(env | grep -c ^RAY_) of Ray; exit 3", resources={"cpus": 1})
    plane.until_status(job, "failed")
    lines = [line["text"] for line in plane.shoal.logs(job.job_id)]
    assert any(line in ("from n0, 0 of Ray", "from n1, 0 of Ray") for line in lines)
    assert plane.attempts(job)[-1]["exit_code"] == 3


def test_a_killed_control_plane_finds_everything_again(plane: RayPlane) -> None:
    job = plane.submit("echo begun; sleep 4; echo done", resources={"cpus": 1})
    plane.until_status(job, "running")
    plane.kill()
    plane.up()
    plane.until_status(job, "succeeded")
    # Its end may be heard before the rest of its log, whose keeper had nobody to hand it in to.
    until(
        lambda: [line["text"] for line in plane.shoal.logs(job.job_id)] == ["begun", "done"],
        "the log is whole",
    )
    assert len(plane.attempts(job)) == 1


@needs_torch
def test_training_on_two_nodes_goes_on_after_a_lost_node(plane: RayPlane) -> None:
    job = _train(plane)
    kept = plane.shared / "checkpoints" / job.job_id
    until(lambda: len(list(kept.glob("step-*"))) >= 2, "two checkpoints are there", within_s=120.0)
    done = plane.command("drill", "kill-node", job.ref, "--window", "2s", "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    told = json.loads(done.stdout)["result"]
    assert (told["outcome"], told["new_attempts"]) == ("recovered", 0)
    print(f"kill-node on Ray: next step after {told['stepped_s']:.1f} s, {told['steps_lost']} steps lost")
    job.stop()
    plane.until_status(job, "cancelled")


def test_a_ray_of_our_own_is_started_kept_to_this_machine_and_started_again(tmp_path: Path) -> None:
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    plane = RayPlane(tmp_path / "home")
    try:
        told = plane.connect()
        assert (told["alive"], told["nodes_on"]) == (1, "127.0.0.1:7464")
        head = json.loads((plane.home / "ray" / "head.json").read_text())["pid"]
        assert (plane.home / "ray" / "token").stat().st_mode & 0o777 == 0o600
        assert {host for host, _ in listening(session(head))} == {"127.0.0.1"}
        plane.up()
        job = plane.submit("echo begun; sleep 20; echo done", resources={"cpus": 1})
        plane.until_status(job, "running")
        for pid in session(head):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        plane.until_status(job, "succeeded")
        assert len(plane.attempts(job)) == 1
        after = plane.submit("true", resources={"cpus": 1})
        until(lambda: after.refresh().status == "succeeded", "the next head takes work", within_s=240.0)
    finally:
        plane.down()
        done = plane.command("connect", "local")
    assert "stopped the Ray of our own" in done.stdout
    assert session(json.loads((plane.home / "ray" / "head.json").read_text())["pid"]) == []


LOOPBACK = {
    "0100007F": "127.0.0.1",
    "0000000000000000FFFF00000100007F": "127.0.0.1",
    "00000000000000000000000001000000": "127.0.0.1",
}
"""As the kernel writes it: in version 4, as 4 in 6, in version 6."""


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Where these processes take TCP connections."""
    sockets: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            sockets |= {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                host, port = fields[1].split(":")
                found.add((LOOPBACK.get(host, host), int(port, 16)))
    return found


def _train(plane: RayPlane) -> JobHandle:
    job = plane.shoal.submit(
        name="train",
        setup=f"cat > train.py <<'END'\n{PROGRAM}\nEND",
        run="python train.py",
        workdir=None,
        resources={"nodes": 2, "gpus": 1},
        ranks_per_node=1,
        checkpoint={},
        retry={"max": 30},
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE, "CUDA_VISIBLE_DEVICES": ""},
    )
    return plane.until_status(job, "running")
