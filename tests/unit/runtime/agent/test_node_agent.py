"""A node agent and its task: what it fetches, what it reports, and how it ends."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.clock import BootClock
from shoal.engines.fake import VirtualClock
from shoal.runtime.agent import node_agent
from shoal.runtime.agent.control_plane_client import ControlPlaneClient, ControlPlaneRefused
from shoal.runtime.agent.node_agent import DONE, NO_ORDER, NodeAgent
from shoal.runtime.files import spool
from shoal.wire import (
    EndKind,
    GpuHandle,
    LaunchRequest,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskCredentials,
    TaskSpec,
    TaskSpecRequest,
)
from tests.support.runtime.task_specs import change_task_spec
from tests.support.runtime.tasks import SOURCE
from tests.unit.engines.remote.test_mailbox_terms import ORDER


class FakeControlPlane(ControlPlaneClient):
    """Has one task spec, whose archive is missing, and remembers the reports it gets."""

    def add_urls(self, urls: tuple[str, ...]) -> None:
        """There is no other control plane."""

    def __init__(self, task_spec: TaskSpec = ORDER, *, has_archive: bool = False) -> None:
        self.assignment = TaskAssignment(
            task_spec=task_spec, credentials=TaskCredentials(proof_key="key"), has_archive=has_archive
        )
        self.fetched: list[TaskSpecRequest] = []
        self.reports: list[tuple[str, StatusReport]] = []

    def fetch_task(self, bootstrap_token: str, request: TaskSpecRequest) -> TaskAssignment:
        self.fetched.append(request)
        return self.assignment

    def fetch_archive(self, bootstrap_token: str, request: TaskSpecRequest, path: str) -> None:
        raise ControlPlaneRefused("the snapshot is gone")

    def send_report(self, key: str, report: StatusReport, chunk: bytes) -> StatusReply:
        self.reports.append((key, report))
        return StatusReply(is_recorded=True)


def run(
    monkeypatch: pytest.MonkeyPatch, control_plane: FakeControlPlane, root: Path, devices_from: str = ""
) -> int:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    launch_request = LaunchRequest(
        attempt_id="att_1",
        urls=("https://a:1",),
        ca="ca",
        bootstrap_token="t",
        spool=str(root),
        devices_variable=devices_from,
    )
    return NodeAgent(launch_request, "n1", control_plane).run()


def end_message(control_plane: FakeControlPlane) -> str:
    [(key, report)] = control_plane.reports
    assert (key, report.process) == ("key", control_plane.fetched[0].process)
    assert report.outcome is not None
    assert (report.outcome.kind, report.outcome.node, report.outcome.epoch) == (EndKind.LOST, "n1", 1)
    return report.outcome.message


def test_no_task_spec_is_fetched_without_a_directory_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "everybodys"
    root.mkdir()
    root.chmod(0o777)
    control_plane = FakeControlPlane()
    assert run(monkeypatch, control_plane, root) == NO_ORDER
    assert control_plane.fetched == []
    assert "is not a directory that only user" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "a" * 32])
def test_node_agent_uses_the_given_process_name_or_makes_one(name: str) -> None:
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1",), ca="", bootstrap_token="t", process=name
    )
    names = {NodeAgent(launch_request, "n1", FakeControlPlane(ORDER))._request.process for _ in range(2)}
    assert names == {name} if name else len(names) == 2


def test_missing_archive_ends_the_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    control_plane = FakeControlPlane(has_archive=True)
    assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
    assert end_message(control_plane) == "n1 could not start its task: the snapshot is gone"
    assert "the snapshot is gone" in capfd.readouterr().err
    assert list((tmp_path / "spool" / "spool" / "live" / "att_1").iterdir()) == []


def test_failed_fork_ends_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    control_plane = FakeControlPlane()
    assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
    assert "Resource temporarily unavailable" in end_message(control_plane)


@pytest.mark.parametrize("devices", ["GPU-5f2c1f3e", "MIG-1/2/3", "0", "0,1,2", "", "0,GPU-5f2c1f3e", "a,b"])
def test_devices_that_do_not_fit_the_task_spec_end_the_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, devices: str
) -> None:
    monkeypatch.setenv("GIVEN", devices)
    control_plane = FakeControlPlane(change_task_spec(ORDER, gpu_ids=(4, 5)))
    assert run(monkeypatch, control_plane, tmp_path / "spool", devices_from="GIVEN") == DONE
    assert f"its task spec is for 2 GPUs; the cluster gave 'GIVEN={devices}'" in end_message(control_plane)


@pytest.mark.parametrize(
    ("limit_s", "most_s", "ago_s", "given_s"),
    [
        (60.0, None, 0.0, 60.0),
        (None, 50.0, 0.0, None),
        (60.0, 50.5, 0.0, 50.0),
        (60.0, 90.5, 0.0, 60.0),
        (60.0, 90.5, 50.0, 40.0),  # the time of the task before it, whose place it has
        (60.0, 50.0, 70.0, 0.0),
    ],
)
def test_supervisor_of_a_node_agent_ends_before_the_clusters_time_limit(
    limit_s: float | None, most_s: float | None, ago_s: float, given_s: float | None
) -> None:
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1",), ca="", bootstrap_token="t", time_limit_s=most_s
    )
    task_spec = change_task_spec(ORDER, time_limit_s=limit_s)
    began_at = BootClock().monotonic() - ago_s
    fitted = NodeAgent(launch_request, "n1", FakeControlPlane(task_spec), began_at=began_at)._adapted_to_node(
        task_spec
    )
    assert fitted.resources.time_limit_s == given_s


@pytest.mark.parametrize("name", ["", "GIVEN"])
def test_supervisor_of_a_node_agent_has_no_standby(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("GIVEN", "3,5")
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1",), ca="", bootstrap_token="t", devices_variable=name
    )
    task_spec = change_task_spec(ORDER, has_standby=True, gpu_ids=(0, 1))
    fitted = NodeAgent(launch_request, "n1", FakeControlPlane(task_spec))._adapted_to_node(task_spec)
    assert not fitted.ranks.has_standby
    assert fitted.resources.gpu_ids == ((3, 5) if name else (0, 1))


@pytest.mark.parametrize(
    ("devices", "gpu_ids", "uuids"),
    [
        ("3,5", (3, 5), ("", "")),
        ("GPU-5f2c1f3e-aa,GPU-0d1", (0, 1), ("GPU-5f2c1f3e-aa", "GPU-0d1")),
        ("MIG-GPU-5f2c/1/0,MIG-77-e", (0, 1), ("MIG-GPU-5f2c/1/0", "MIG-77-e")),
    ],
)
def test_task_gets_the_devices_that_the_cluster_chose(
    monkeypatch: pytest.MonkeyPatch, devices: str, gpu_ids: tuple[int, ...], uuids: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GIVEN", devices)
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://a:1",), ca="", bootstrap_token="t", devices_variable="GIVEN"
    )
    task_spec = change_task_spec(ORDER, gpu_ids=(6, 7), gpus=(GpuHandle(index=6, minor=6),))
    fitted = NodeAgent(launch_request, "n1", FakeControlPlane(task_spec))._adapted_to_node(task_spec)
    assert fitted.resources.are_gpus_chosen_by_cluster
    assert (fitted.resources.gpu_ids, fitted.resources.gpu_minors) == (gpu_ids, ())
    assert tuple(gpu.uuid for gpu in fitted.resources.gpus) == uuids


class FakeControlPlaneOfLostTasks(FakeControlPlane):
    """Its task cannot start, twice. The third time there is no task spec any more."""

    def fetch_task(self, bootstrap_token: str, request: TaskSpecRequest) -> TaskAssignment:
        self.fetched.append(request)
        if len(self.fetched) == 3:
            raise ControlPlaneRefused("it has ended")
        return self.assignment


@pytest.mark.parametrize(("can_follow", "num_nodes", "fetched"), [(True, 2, 3), (True, 1, 1), (False, 2, 1)])
def test_node_agent_asks_for_a_replacement_of_its_lost_task(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, can_follow: bool, num_nodes: int, fetched: int
) -> None:
    nodes = ("n1", "n2")[:num_nodes]
    task_spec = change_task_spec(ORDER, nodes=nodes, max_restarts=9, replacement=4)
    control_plane = FakeControlPlaneOfLostTasks(task_spec, has_archive=True)
    monkeypatch.setattr(node_agent, "ControlPlaneClient", lambda *_: control_plane)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # A node agent changes its process, which later tests in this one must not inherit.
    monkeypatch.setattr(os, "umask", lambda _: 0)
    for name in ("hide_memory", "become_subreaper"):
        monkeypatch.setattr(f"shoal.runtime.process.kernel.{name}", lambda: None)
    launch_request = LaunchRequest(
        attempt_id="att_1",
        urls=("https://a:1",),
        ca="ca",
        bootstrap_token="t",
        spool=str(tmp_path / "spool"),
        replacement=4,
        can_replace=can_follow,
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(launch_request))))
    assert node_agent.main(["n1"]) == DONE
    assert [request.previous_replacement for request in control_plane.fetched] == [None, 4, 4][:fetched]
    assert len({request.process for request in control_plane.fetched}) == fetched
    assert [report.will_replace for _, report in control_plane.reports] == [fetched > 1] * len(
        control_plane.reports
    )


def test_outcome_is_reported_even_if_the_disk_refuses_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write = os.write

    def full(fd: object, data: bytes) -> int:
        if isinstance(fd, int) and fd != 2:
            return write(fd, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(node_agent, "_kill_children", lambda: True)
    monkeypatch.setattr(NodeAgent, "_fork", lambda *_: -1)
    monkeypatch.setattr(os, "waitpid", lambda *_: (1, 9))
    monkeypatch.setattr(spool, "write_outcome", full)
    monkeypatch.setattr(os, "write", full)
    control_plane = FakeControlPlane()
    assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
    assert end_message(control_plane) == "its supervisor died without an outcome"


class TestUnreadableDisk:
    """A log, a start record or an outcome that cannot be read does not end running ranks."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> set[str]:
        """Names of files that cannot be read while they are in here."""
        names: set[str] = set()
        stat, read = os.stat, node_agent._read_chunk

        def fail(path: str) -> None:
            if Path(path).name in names:
                raise OSError(errno.EIO, "Input/output error")

        def a_stat(path: Any, **how: Any) -> os.stat_result:
            fail(os.fspath(path) if isinstance(path, (str, os.PathLike)) else "")
            return stat(path, **how)

        def a_read(path: str, offset: int) -> bytes:
            fail(path)
            return read(path, offset)

        def spooled(name: str, real: Any) -> Any:
            def a_word(task: spool.SpoolTask) -> Any:
                fail(name)
                return real(task)

            return a_word

        monkeypatch.setattr(os, "stat", a_stat)
        monkeypatch.setattr(node_agent, "_read_chunk", a_read)
        for name in ("started", "outcome"):
            monkeypatch.setattr(spool, f"read_{name}", spooled(name, getattr(spool, f"read_{name}")))
        return names

    def test_node_agent_goes_on_and_sends_heartbeats(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        broken: set[str],
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        control_plane = FakeControlPlane()
        ends = iter([(0, 0)] * 5 + [(1, 9)])

        def mend() -> bool:
            broken.clear()
            return True

        monkeypatch.setattr(node_agent, "_kill_children", mend)
        monkeypatch.setattr(NodeAgent, "_fork", lambda *_: -1)
        monkeypatch.setattr(os, "waitpid", lambda *_: next(ends))
        for name, value in (("PING_S", 0.01), ("LONE_PING_S", 0.01), ("TURN_S", 0.02), ("KILL_AFTER_S", 0.1)):
            monkeypatch.setattr(node_agent, name, value)
        broken |= {"log", "started", "outcome"}
        assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
        *living, (_, last) = control_plane.reports
        assert living, "heartbeats"
        assert {report.outcome for _, report in living} == {None}
        assert last.outcome is not None
        assert last.outcome.message == "its supervisor died without an outcome"
        assert capfd.readouterr().err.count("cannot read what there is to report") == 1

    def test_outcome_waits_for_the_rest_of_the_log_but_not_for_ever(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: set[str]
    ) -> None:
        control_plane = FakeControlPlane(has_archive=True)
        broken.add("log")
        clock = VirtualClock()
        monkeypatch.setattr(node_agent, "BootClock", lambda: clock)
        monkeypatch.setattr(time, "sleep", clock.advance)
        assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
        assert end_message(control_plane).startswith("n1 could not start its task")
        assert clock.monotonic() >= node_agent.UNREAD_S


def test_log_of_several_chunks_is_sent_before_the_outcome(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Taking(FakeControlPlane):
        def send_report(self, key: str, report: StatusReport, chunk: bytes) -> StatusReply:
            self.reports.append((key, report))
            return StatusReply(size=report.offset + len(chunk), is_recorded=report.outcome is not None)

    monkeypatch.setattr(node_agent, "CHUNK_BYTES", 4)

    def prepare(_: NodeAgent, task: spool.SpoolTask, *__: object) -> None:
        Path(task.directory).mkdir(parents=True)
        Path(task.log).write_bytes(b"123456789")
        raise ControlPlaneRefused("enough")

    control_plane = Taking()
    monkeypatch.setattr(NodeAgent, "_prepare", prepare)
    assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
    assert [(sent.offset, sent.outcome is None) for _, sent in control_plane.reports] == [
        (0, True),
        (4, True),
        (8, False),
    ]


def test_node_agent_reports_leftovers_until_they_are_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Witness(FakeControlPlane):
        def send_report(self, key: str, report: StatusReport, chunk: bytes) -> StatusReply:
            self.reports.append((key, report))
            return StatusReply(is_recorded=report.outcome is not None)

    control_plane = Witness()
    monkeypatch.setattr(
        node_agent,
        "_kill_children",
        lambda: sum(1 for _, sent in control_plane.reports if sent.leftovers) >= 2,
    )
    monkeypatch.setattr(NodeAgent, "_fork", lambda *_: -1)
    monkeypatch.setattr(os, "waitpid", lambda *_: (1, 9))
    monkeypatch.setattr(node_agent, "KILL_AFTER_S", 0.3)
    for name in ("PING_S", "LONE_PING_S"):
        monkeypatch.setattr(node_agent, name, 0.01)
    assert run(monkeypatch, control_plane, tmp_path / "spool") == DONE
    first, *_, last = [sent for _, sent in control_plane.reports]
    assert (first.leftovers, first.outcome) == (
        "",
        None,
    )  # processes have a moment to die before they are reported
    assert last.outcome is not None
    assert (last.leftovers, last.outcome.kind) == ("", EndKind.LOST)
    assert {sent.leftovers for _, sent in control_plane.reports} == {
        "",
        "the supervisor on n1 is dead, and something of it does not die",
    }


def test_message_that_cannot_be_written_ends_no_process(tmp_path: Path) -> None:
    code = (
        "import os; os.close(2); from shoal.runtime.agent.node_agent import _say;"
        " _say('a\\udcff word'); print('lives')"
    )
    env = {**os.environ, "PYTHONPATH": SOURCE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"lives\n")
