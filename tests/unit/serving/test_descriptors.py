"""A process that runs out of descriptors or memory blames itself, not the replicas."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from shoal.serving import checks, plane
from shoal.serving.descriptors import clients_within
from shoal.serving.replica import LiveReplica
from shoal.serving.upstream import Upstream
from tests.support.serving import Lab, get, service

RAISED = """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
from shoal.serving.descriptors import raised
print(raised() == resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard)
"""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.EAGAIN])
async def test_replica_is_not_blamed_for_what_we_lack(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async def lacking(replica: LiveReplica, visitor: object = None) -> Upstream:
        raise OSError(number, "no more")

    lab.serve(service(await lab.replica(), check="/"))
    live = lab.plane.services["p", "s"]
    replica = next(iter(live.replicas.values()))
    with monkeypatch.context() as patched:
        patched.setattr(plane, "connect", lacking)
        patched.setattr(checks, "connect", lacking)
        answer = await lab.ask(get())
        assert (answer.status, answer.get("retry-after")) == (503, "2")
        for _ in range(checks.MAX_FAILED + 1):
            await checks.check(live, replica)
    assert (replica.is_refusing, replica.failures, replica.ejections) == (False, 0, 0)
    assert (await lab.ask(get())).status == 200


@pytest.mark.parametrize(
    ("descriptors", "asked", "taken"), [(1 << 20, 10_000, 10_000), (1024, 10_000, 448), (64, 10_000, 1)]
)
def test_callers_leave_descriptors_for_replicas(descriptors: int, asked: int, taken: int) -> None:
    assert clients_within(descriptors, asked) == taken


def test_process_takes_all_descriptors_it_may_have() -> None:
    ran = subprocess.run([sys.executable, "-c", RAISED], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"


@pytest.mark.parametrize(("soft", "most", "had"), [(64, 256, 256), (512, 256, 512)])
def test_process_takes_no_more_descriptors_than_it_asks_for_and_gives_none_back(
    soft: int, most: int, had: int
) -> None:
    asked = (
        RAISED.replace("(64,", f"({soft},")
        .replace("raised()", f"raised({most})")
        .replace("hard)\n", f"{had})\n")
    )
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
