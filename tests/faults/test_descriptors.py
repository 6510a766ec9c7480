"""A control plane without a file descriptor to spare: it may refuse, never lie, and must come back."""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.faults.people import TAKEN, Person, is_root, running, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not is_root(), reason="the cluster's jobs mount a directory, which takes root"),
    pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit (util-linux)"),
]

MOST = 120
"""Descriptors the control plane may have; it uses about half of them when idle."""
SPARE = 3


@contextlib.contextmanager
def crowd(person: Person, size: int) -> Iterator[None]:
    """That many connections, each with half a request and all the time in the world."""
    parts = urlsplit(person.endpoint.url)
    with contextlib.ExitStack() as stack:
        for _ in range(size):
            guest = stack.enter_context(socket.socket())
            guest.settimeout(5)
            with contextlib.suppress(OSError):
                guest.connect((parts.hostname or "", parts.port or 0))
                guest.sendall(b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        yield


def descriptors(pid: int) -> set[int]:
    return {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}


@contextlib.contextmanager
def limit(pid: int, spare: int) -> Iterator[int]:
    """The process may open that many more files, or fewer, until the block ends. Its limit meanwhile.

    Bounds on connections leave a crowd no way to take every descriptor, so the limit comes down to the crowd.
    """
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = descriptors(pid)
    most = next(number for number in range(before[0]) if number not in used) + spare
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, before[1]))
    try:
        yield most
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_without_descriptors_nothing_is_acknowledged_falsely_and_all_comes_back(root: Path) -> None:
    with running(root, prefix=("prlimit", f"--nofile={MOST}:{MOST}")) as person:
        cluster = person.cluster
        ends_meanwhile = person.start("ends-meanwhile")
        runs_on = person.start("runs-on")
        assert len(descriptors(cluster.pid)) < MOST - 20
        with limit(cluster.pid, SPARE) as most, crowd(person, 3 * MOST):
            until(
                lambda: descriptors(cluster.pid) >= set(range(most)), "the crowd has taken every descriptor"
            )
            answers = [person.submit(person.short(f"short-{number}")) for number in range(30)]
            assert set(answers) <= {0, 503, *TAKEN}
            assert not set(answers) <= set(TAKEN), "there were descriptors to spare"
            person.let_go("ends-meanwhile")
            until(lambda: len(cluster.find_processes().ranks) <= 2, "one job has ended")
            assert cluster.find_processes().ranks, "the crowd ended a job that runs"
        assert person.wait_for(ends_meanwhile, "succeeded")["epoch"] == 1
        person.wait_for(runs_on, "running")
        person.let_go("runs-on")
        assert person.wait_for(runs_on, "succeeded")["epoch"] == 1
        for key, spec in list(person.refused.items()):
            assert person.submit(spec, key) in TAKEN
        for job_id in person.acknowledged.values():
            person.wait_for(job_id, "succeeded")
        assert len(person.jobs()) == len(person.acknowledged)
        assert person.is_log_intact()
        assert cluster.starts == 1, f"the control plane died:\n{cluster.last_output()}"
