"""`python -m tests.support.fakes.node_agent SPOOL ATTEMPT RUN [WORD...]`: a real keeper, whose desk is its
own
process. The words are the confinement. What is told of the end of the share is written to standard output.
"""

from __future__ import annotations

import sys

import msgspec

from shoal.runtime.agent.control_plane_client import ControlPlaneClient
from shoal.runtime.agent.node_agent import NodeAgent
from shoal.runtime.process import kernel
from shoal.wire import (
    LaunchRequest,
    StatusReply,
    StatusReport,
    TaskAssignment,
    TaskCredentials,
    TaskSpec,
    TaskSpecRequest,
)
from tests.support.runtime.tasks import a_task_spec


class FakeControlPlaneClient(ControlPlaneClient):
    def __init__(self, task_spec: TaskSpec) -> None:
        self._task_spec = task_spec

    def add_urls(self, urls: tuple[str, ...]) -> None:
        """Nobody else is there."""

    def fetch_task(self, bootstrap_token: str, request: TaskSpecRequest) -> TaskAssignment:
        credentials = TaskCredentials(proof_key="key")
        return TaskAssignment(task_spec=self._task_spec, credentials=credentials, has_archive=False)

    def send_report(self, key: str, report: StatusReport, chunk: bytes) -> StatusReply:
        if report.outcome is not None:
            sys.stdout.buffer.write(msgspec.json.encode(report.outcome) + b"\n")
            sys.stdout.buffer.flush()
        return StatusReply(size=report.offset + len(chunk), is_recorded=report.outcome is not None)


def main(spool: str, attempt_id: str, run: str, *confinement: str) -> int:
    order = a_task_spec(attempt_id=attempt_id, run=run, confinement=confinement)
    launch_request = LaunchRequest(
        attempt_id=attempt_id, urls=("https://a:1",), ca="ca", bootstrap_token="t", spool=spool
    )
    kernel.become_subreaper()
    return NodeAgent(launch_request, order.identity.node, FakeControlPlaneClient(order)).run()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
