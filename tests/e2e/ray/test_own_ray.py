"""A Ray that Shoal starts itself, on this machine alone."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.host.processes import listeners
from tests.support.planes.real import RealPlane, until
from tests.support.ray.real_ray import RAY_PYTHON, session_pids, what_is_missing
from tests.support.runtime.tasks import SOURCE

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]


def connected(home: Path) -> RealPlane:
    plane = RealPlane(home, demo="none")
    words = ("--as-root", "--python-path", SOURCE, "--ray-python", str(RAY_PYTHON), "--spool")
    done = plane.command("connect", "ray", *words, str(home.parent / "spool"), "--json", timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["alive"], told["nodes_on"]) == (1, "127.0.0.1:7464")
    return plane


def is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[RealPlane]:
    """Up, over a Ray of its own, which is stopped by who goes back to this machine alone."""
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(missing)
    plane = connected(tmp_path / "home")
    try:
        plane.up()
        yield plane
    finally:
        plane.down()
        done = plane.command("connect", "local")
    assert "stopped the Ray that Shoal had started" in done.stdout
    assert session_pids(head_of(plane)) == []


def head_of(plane: RealPlane) -> int:
    return int(json.loads((plane.home / "ray" / "head.json").read_text())["pid"])


def test_a_ray_of_our_own_is_started_and_kept_to_this_machine(plane: RealPlane) -> None:
    assert (plane.home / "ray" / "token").stat().st_mode & 0o777 == 0o600
    opened = listeners(session_pids(head_of(plane)))
    assert opened
    assert [one for one in opened if not is_loopback(one.host)] == []
    plane.until_status(plane.submit("true", resources={"cpus": 1}), "succeeded")


@pytest.mark.soak
def test_a_ray_of_our_own_that_was_killed_is_started_again_under_what_runs(plane: RealPlane) -> None:
    job = plane.submit("echo begun; sleep 20; echo done", resources={"cpus": 1})
    plane.until_status(job, "running")
    for pid in session_pids(head_of(plane)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    after = plane.submit("true", resources={"cpus": 1})
    until(lambda: plane.shoal.nodes()[0]["unanswered"], "people are told that Ray is away", within_s=15.0)
    told = after.why()
    assert (told["status"], told["explanation"]["why"]) == ("starting", "not_begun"), told["sentence"]
    until(lambda: after.refresh().status == "succeeded", "the next head takes work", within_s=240.0)
    plane.until_status(job, "succeeded")
    assert len(plane.attempts(job)) == 1
