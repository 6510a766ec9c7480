"""`make demo` from its first line to its last, and what is left when it is interrupted."""

from __future__ import annotations

import getpass
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo.place import PREFIX, a_stage
from tests.style.tree import ROOT
from tests.support.shares import processes_with
from tests.support.torchrun import needs_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_torch]
alone = pytest.mark.serial
"""A whole demo shows what comes of training while it goes on: too slow a machine shows something else."""
LIMIT_S = 200.0
SHOWN = (
    "shoal up",
    "shoal nodes",
    "shoal run",
    "shoal queue",
    "shoal why all-four",
    "shoal logs",
    "shoal drill kill-rank lm-ddp",
    "shoal drill kill-node lm-ddp",
    "shoal drill kill-control",
    "shoal drill history",
    "shoal audit --verify",
    "shoal down --jobs",
)


def begin(place: Path) -> subprocess.Popen[str]:
    """A demo of a person whose home and temporary directory are below `place`."""
    (place / "tmp").mkdir(exist_ok=True)
    env = {**os.environ, "HOME": str(place / "own"), "TMPDIR": str(place / "tmp"), "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env={**env, "SHOAL_HOME": str(place / "own" / ".shoal")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """All that one whole demo says."""
    place = tmp_path_factory.mktemp("demo")
    demo = begin(place)
    try:
        said, _ = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.kill()
    assert demo.returncode == 0, said
    assert list((place / "tmp").iterdir()) == [], "it cleans up"
    assert not (place / "own").exists(), "and does not touch what is the user's own"
    assert processes_with(str(place)) == []
    return said


@alone
def test_it_types_real_commands(told: str) -> None:
    typed = [line[2:] for line in told.splitlines() if line.startswith("$ ")]
    assert [command for command in SHOWN if not any(line.startswith(command) for line in typed)] == []


@alone
def test_it_shows_work_waiting_and_why(told: str) -> None:
    assert re.search(r"all-four +\S+ +queued .* resources", told)
    assert "waiting: needs 4 nodes with 2 free GPUs" in told
    assert re.search(r"^\[0\] step +\d+ of 160  loss", told, re.MULTILINE)


@alone
def test_it_breaks_three_things_and_all_come_back(told: str) -> None:
    begun = re.findall(
        r"^drill drl_\w+: (killing (?:rank 1|the supervisor|the control plane))", told, re.MULTILINE
    )
    assert begun == ["killing rank 1", "killing the supervisor", "killing the control plane"]
    assert told.count("outcome        recovered") == 3
    kept = re.findall(r"^\d+ \w+ [\d:]+ +(kill-\w+) +\S+ +([\d.]+)s .* recovered$", told, re.MULTILINE)
    assert [kind for kind, _ in kept] == ["kill-rank", "kill-node", "kill-control"]


@alone
def test_the_loss_went_on_falling_through_all_of_it(told: str) -> None:
    curve = told.partition("it went on falling:")[2]
    first, last = (
        re.search(r"^ +([\d.]+) \|\*", curve, re.MULTILINE),
        re.findall(r"^ +([\d.]+) \|", curve, re.MULTILINE)[-1],
    )
    assert first is not None
    assert float(last) < float(first[1]) / 10
    marks = re.findall(r"^ +([RNC]) .+, at step (\d+)$", curve, re.MULTILINE)
    assert [sign for sign, _ in marks] == ["R", "N", "C"]
    assert 12 <= int(marks[0][1]) <= int(marks[1][1]) <= int(marks[2][1]) <= 160
    assert "10 jobs accepted, 10 succeeded, 0 lost;\n160 of 160 training steps made" in told
    assert re.search(r"^intact: \d+ entries", told, re.MULTILINE)


@alone
def test_it_ends_with_what_to_try_next(told: str) -> None:
    assert "No process of the demo is left" in told
    assert "What to try next:" in told.splitlines()[-9]
    assert "shoal run -- " in told


@alone
def test_the_readmes_transcript_is_what_it_says(told: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("<!-- transcript")[2].partition("<!-- end of transcript -->")[0]
    lines = [line for line in shown.splitlines()[1:] if line.strip() and not line.startswith("```")]
    said = {plain(re.sub(rf"\b{getpass.getuser()}\b", "root", line)) for line in told.splitlines()}
    assert len(lines) > 10
    assert [line for line in lines if line != "..." and plain(line) not in said] == []


def plain(line: str) -> str:
    """Without what differs from run to run: numbers, and how wide they are."""
    return re.sub(r"\s+", " ", re.sub(r"\d+", "0", line)).strip()


@contextmanager
def running(place: Path, until: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that has come as far as to say `until`."""
    demo = begin(place)
    assert demo.stdout is not None
    try:
        for line in demo.stdout:
            if until in line:
                break
        yield demo
    finally:
        demo.kill()
        demo.communicate()


def wait_for(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.1)


@pytest.mark.soak
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "=== 3") as demo:
        demo.send_signal(signal.SIGINT)
        said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted; everything the demo started was stopped and removed" in said
    assert list((tmp_path / "tmp").iterdir()) == []
    wait_for(lambda: processes_with(str(tmp_path)) == [], "nothing runs any more")


@pytest.mark.soak
def test_what_a_killed_demo_left_is_cleared_away_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, "=== 3") as demo:
        demo.kill()
    left = next((tmp_path / "tmp").glob(f"{PREFIX}*"))
    assert processes_with(str(left)) != []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with a_stage() as stage:
        assert not left.exists()
        assert processes_with(str(left)) == []
        assert stage.home.parent.exists()
    assert f"an earlier demo was interrupted: stopping what runs in {left}" in capfd.readouterr().out
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_demo_that_still_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with a_stage() as first, a_stage() as second:
        assert first.home.parent.exists()
        assert second.home.parent.exists()
