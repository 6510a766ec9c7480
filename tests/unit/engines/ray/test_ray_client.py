"""The way to the bridge, over bridges on paper: one that hangs or dies costs an answer, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.ray import client as client_module
from shoal.engines.ray.client import RayClient
from shoal.engines.ray.config import RayConfig
from shoal.errors import EngineUnreachable, SpecError

GOOD = """
import json, os, sys, time
setup = json.loads(sys.stdin.readline())
print(json.dumps({"ready": {"ray": "2.60.0", "python": str(os.getpid())}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["verb"] == "look":
        time.sleep(100)
    if asked["verb"] == "end":
        print("last words", file=sys.stderr)
        sys.exit(1)
    if asked["verb"] == "dismiss":
        print(json.dumps({"id": asked["id"], "error": "the head is away"}), flush=True)
        continue
    print(json.dumps({"id": asked["id"], "told": {"verb": asked["verb"], "setup": setup}}), flush=True)
"""
FAILS = """
import json, sys
sys.stdin.readline()
print(json.dumps({"failed": "ConnectionError: nobody there"}), flush=True)
"""
WITHOUT_RAY = "import sys\nprint(\"ModuleNotFoundError: No module named 'ray'\", file=sys.stderr)\n"


class Paper:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = folder / "bridge.py"
        self.finds = 0
        self.clock = VirtualClock()
        self.write(GOOD)
        monkeypatch.setattr(client_module, "BRIDGE", self.file)
        monkeypatch.setattr(client_module, "AGAIN_S", 60.0)  # on a busy machine
        self.client = RayClient(
            RayConfig(address="h:1", token_file="/token", ray_python=sys.executable, spool="/spool"),
            namespace="tests",
            log_file=folder / "logs" / "bridge.log",
            find=self._find,
            clock=self.clock,
        )

    def write(self, script: str) -> None:
        self.file.write_text(script)

    def _find(self) -> tuple[str, Path]:
        self.finds += 1
        return "h:1", Path("/token")


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    paper = Paper(tmp_path, monkeypatch)
    yield paper
    paper.client.close()


def test_one_bridge_answers_every_question(paper: Paper) -> None:
    nodes = paper.client.nodes()
    assert (nodes["verb"], nodes["setup"]["root"], nodes["setup"]["lifetime"]) == (
        "nodes",
        "/spool",
        "detached",
    )
    pid = paper.client.version()["python"]
    paper.client.start([])
    assert (paper.client.version()["python"], paper.finds) == (pid, 1)


def test_a_bridge_that_hangs_is_killed_and_the_next_question_gets_another(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paper.client.version()["python"]
    monkeypatch.setattr(client_module, "WITHIN_S", 0.0)
    monkeypatch.setattr(client_module, "SLACK_S", 0.2)
    with pytest.raises(EngineUnreachable, match="did not answer `look`"):
        paper.client.look({})
    assert not Path(f"/proc/{first}").exists()
    assert paper.client.version()["python"] != first


def test_error_of_a_dead_bridge_has_its_last_line(paper: Paper) -> None:
    with pytest.raises(EngineUnreachable, match="last words"):
        paper.client.end({})
    assert paper.client.nodes()["verb"] == "nodes"
    assert paper.finds == 2


def test_error_reply_does_not_end_the_bridge(paper: Paper) -> None:
    pid = paper.client.version()["python"]
    with pytest.raises(EngineUnreachable, match="the head is away"):
        paper.client.dismiss()
    assert paper.client.version()["python"] == pid


def test_bridge_with_only_error_replies_is_replaced(paper: Paper) -> None:
    pid = paper.client.version()["python"]
    for _ in range(client_module.MAX_ERRORS - 1):
        with pytest.raises(EngineUnreachable, match="the head is away"):
            paper.client.dismiss()
    paper.client.nodes()  # it has a Ray: what it said before does not count
    for _ in range(client_module.MAX_ERRORS):
        assert paper.client.version()["python"] == pid
        with pytest.raises(EngineUnreachable, match="the head is away"):
            paper.client.dismiss()
    assert not Path(f"/proc/{pid}").exists()
    assert paper.client.version()["python"] != pid


def test_starts_that_fail_are_not_repeated_at_once(paper: Paper) -> None:
    paper.write(FAILS)
    for _ in range(3):
        with pytest.raises(EngineUnreachable, match="nobody there"):
            paper.client.nodes()
    assert paper.finds == 1
    paper.write(GOOD)
    paper.clock.advance(1.0)
    assert paper.client.nodes()["verb"] == "nodes"


def test_python_without_ray_is_named_in_the_error(paper: Paper) -> None:
    paper.write(WITHOUT_RAY)
    with pytest.raises(SpecError) as raised:
        paper.client.nodes()
    assert "shoal[ray]" in (raised.value.hint or "")


HALF = "import sys\nsys.stdin.readline()\nsys.stdout.write('{\"ready')\n"


def test_a_bridge_that_ends_in_the_middle_of_a_line_is_known_to_have_ended(paper: Paper) -> None:
    paper.write(HALF)
    with pytest.raises(EngineUnreachable, match="the bridge ended"):
        paper.client.nodes()


def test_short_patience_ends_the_wait_for_a_missing_ray(
    paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = threading.Event()

    def find() -> tuple[str, Path]:
        result.wait()
        return "h:1", Path("/token")

    monkeypatch.setattr(paper.client, "_find", find)
    monkeypatch.setattr(paper.client, "_patience_s", 0.05)
    with pytest.raises(EngineUnreachable, match="being looked for"):
        paper.client.nodes()
    result.set()
    monkeypatch.setattr(paper.client, "_patience_s", None)
    assert paper.client.nodes()["verb"] == "nodes"


def test_bridge_that_reads_nothing_is_killed(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SLACK_S", 0.2)
    monkeypatch.setattr(client_module, "WITHIN_S", 0.0)
    os.kill(int(paper.client.version()["python"]), signal.SIGSTOP)
    with pytest.raises(EngineUnreachable):
        paper.client.end({"n": ["x" * 1000] * 1000})
    assert paper.client.nodes()["verb"] == "nodes"
