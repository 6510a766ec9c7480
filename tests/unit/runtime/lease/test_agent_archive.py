"""What kills the processes that a program started when its node agent or its supervisor is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.runtime.files import spool
from shoal.runtime.lease import stop_reasons
from shoal.runtime.lease.stop_reasons import NodeAgentWatch
from shoal.runtime.process import tree
from shoal.wire import EndKind, TaskOutcome
from tests.support.runtime.tasks import NODE_PATH, SOURCE, until

REPO = Path(__file__).parents[4]
WALLS = ("rlimits", "affinity")
"""No confinement by which the kernel would kill processes with the supervisor: no namespaces, no cgroups."""


class NodeAgentWithChild:
    """A real node agent whose rank has a child, as launchers have."""

    def __init__(self, root: Path) -> None:
        self._child = root / "child"
        attempt_id = f"att_{uuid.uuid4().hex}"
        run = f"setsid sleep 600 & echo $! > {self._child}.part; mv {self._child}.part {self._child}; wait"
        arguments = ("-m", "tests.support.fakes.node_agent", str(root / "spool"), attempt_id, run, *WALLS)
        self.agent = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=REPO,
            env={"PYTHONPATH": f"{SOURCE}:{REPO}", "PATH": NODE_PATH},
            stdout=subprocess.PIPE,
        )
        until(self._child.exists)
        self.child = int(self._child.read_text())
        place = next((root / "spool").glob(f"**/spool/live/{attempt_id}/*"))
        self.share = spool.SpoolTask(str(place))
        claim = spool.read_claim(self.share)
        assert claim is not None
        self.supervisor = claim.pid
        self.all = {self.supervisor, *tree.descendants(self.supervisor)}
        assert self.child in self.all

    def living(self) -> dict[int, int]:
        return tree.start_ticks_of(self.all)

    def end(self) -> None:
        self.agent.kill()
        self.agent.communicate(timeout=10)
        for pid in self.living():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def running_agent(tmp_path: Path) -> Iterator[NodeAgentWithChild]:
    node_kin = NodeAgentWithChild(tmp_path)
    yield node_kin
    node_kin.end()


def test_processes_of_a_rank_do_not_outlive_the_node_agent(running_agent: NodeAgentWithChild) -> None:
    running_agent.agent.kill()
    until(
        lambda: not running_agent.living(), 10.0, lambda: f"{running_agent.living()} of {running_agent.all}"
    )
    outcome = spool.read_outcome(running_agent.share)
    assert outcome is not None
    assert (outcome.kind, outcome.message) == (EndKind.LOST, "its node agent was killed")


def test_processes_of_a_rank_do_not_outlive_the_supervisor(running_agent: NodeAgentWithChild) -> None:
    os.kill(running_agent.supervisor, signal.SIGKILL)
    output, _ = running_agent.agent.communicate(timeout=30)
    outcome = msgspec.json.decode(output, type=TaskOutcome)
    assert (outcome.kind, running_agent.living()) == (EndKind.LOST, {})


def test_sigterm_to_a_node_agent_is_an_external_stop(running_agent: NodeAgentWithChild) -> None:
    running_agent.agent.terminate()
    output, _ = running_agent.agent.communicate(timeout=30)
    outcome = msgspec.json.decode(output, type=TaskOutcome)
    assert (outcome.kind, outcome.is_external_stop, running_agent.living()) == (EndKind.STOPPED, True, {})


def test_supervisor_that_does_not_notice_a_dead_node_agent_is_killed(
    tmp_path: Path,
) -> None:
    """The supervisor hangs. By default the kernel would kill it at once, but it asked for a signal
    instead.
    """
    pid_file = tmp_path / "pid"
    agent = os.fork()
    if agent == 0:
        own_pid = os.getpid()
        if os.fork() == 0:
            stop_reasons.LOOK_S, stop_reasons.UNNOTICED_S = 0.05, 0.5
            NodeAgentWatch(own_pid).start()
            pid_file.write_text(f"{os.getpid()}\n")
            while True:
                time.sleep(600)
        signal.pause()
        os._exit(0)
    until(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    supervisor = int(pid_file.read_text())
    os.kill(agent, signal.SIGKILL)
    os.waitpid(agent, 0)
    assert tree.start_ticks_of([supervisor]), "the supervisor got a signal, and was not killed"
    until(lambda: not tree.start_ticks_of([supervisor]), 10.0)
