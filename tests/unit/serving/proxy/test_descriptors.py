"""A process that runs out of descriptors or memory does not count that as a failure of replicas."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from shoal.serving import housekeeping, plane
from shoal.serving.balance.replica import LiveReplica
from shoal.serving.processes import max_clients_within
from shoal.serving.proxy.upstream import Upstream
from tests.support.serving.data_plane_lab import EmbeddedLab, request_bytes, service

RAISED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from shoal.serving.processes import raise_limit
print(raise_limit() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)
"""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.EAGAIN])
async def test_lack_of_local_resources_is_not_counted_as_a_replicas_failure(
    lab: EmbeddedLab, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def lacking(replica: LiveReplica, client_tls: object = None) -> Upstream:
        raise OSError(number, "no more")

    lab.serve(service(await lab.add_replica(), check="/"))
    live = lab.plane.services["p", "s"]
    replica = next(iter(live.replicas.values()))
    with monkeypatch.context() as patched:
        patched.setattr(plane, "connect", lacking)
        patched.setattr(housekeeping, "connect", lacking)
        answer = await lab.ask(request_bytes())
        assert (answer.status, answer.get("retry-after")) == (503, "2")
        for _ in range(housekeeping.MAX_FAILED + 1):
            await housekeeping.check_replica(live, replica)
    assert (replica.is_refusing, replica.failures, replica.ejections) == (False, 0, 0)
    assert (await lab.ask(request_bytes())).status == 200


@pytest.mark.parametrize(
    ("descriptors", "wanted", "max_clients"),
    [(1 << 20, 10_000, 10_000), (1024, 10_000, 448), (64, 10_000, 1)],
)
def test_callers_leave_descriptors_for_replicas(descriptors: int, wanted: int, max_clients: int) -> None:
    assert max_clients_within(descriptors, wanted) == max_clients


def test_process_raises_its_descriptor_limit_to_the_maximum() -> None:
    ran = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


@pytest.mark.parametrize(("soft", "most", "had"), [(64, 256, 256), (512, 256, 512)])
def test_descriptor_limit_is_raised_only_as_far_as_asked_and_never_lowered(
    soft: int, most: int, had: int
) -> None:
    program = (
        RAISED.replace("(64,", f"({soft},")
        .replace("raise_limit()", f"raise_limit({most})")
        .replace("hard)\n", f"{had})\n")
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
