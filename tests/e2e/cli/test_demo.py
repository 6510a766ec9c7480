"""`make demo` from its first line to its last, and what remains after an interrupt."""

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
from tests.support.runtime.tasks import pids_with
from tests.support.runtime.torchrun import needs_torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_torch]
alone = pytest.mark.serial
"""A whole demo shows training results while training continues, so a slow machine shows other ones."""
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
def transcript(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one whole demo."""
    place = tmp_path_factory.mktemp("demo")
    demo = begin(place)
    try:
        output, _ = demo.communicate(timeout=LIMIT_S)
    finally:
        demo.kill()
    assert demo.returncode == 0, output
    assert list((place / "tmp").iterdir()) == [], "it cleans up"
    assert not (place / "own").exists(), "and does not touch what is the user's own"
    assert pids_with(str(place)) == []
    return output


@alone
def test_it_types_real_commands(transcript: str) -> None:
    typed = [line[2:] for line in transcript.splitlines() if line.startswith("$ ")]
    assert [command for command in SHOWN if not any(line.startswith(command) for line in typed)] == []


@alone
def test_it_shows_work_waiting_and_why(transcript: str) -> None:
    assert re.search(r"all-four +\S+ +queued .* resources", transcript)
    assert "waiting: needs 4 nodes with 2 free GPUs" in transcript
    assert re.search(r"^\[0\] step +\d+ of 160  loss", transcript, re.MULTILINE)


@alone
def test_it_breaks_three_things_and_all_come_back(transcript: str) -> None:
    begun = re.findall(
        r"^drill drl_\w+: (killing (?:rank 1|the supervisor|the control plane))", transcript, re.MULTILINE
    )
    assert begun == ["killing rank 1", "killing the supervisor", "killing the control plane"]
    assert transcript.count("outcome        recovered") == 3
    kept = re.findall(r"^\d+ \w+ [\d:]+ +(kill-\w+) +\S+ +([\d.]+)s .* recovered$", transcript, re.MULTILINE)
    assert [kind for kind, _ in kept] == ["kill-rank", "kill-node", "kill-control"]


@alone
def test_the_loss_went_on_falling_through_all_of_it(transcript: str) -> None:
    curve = transcript.partition("it went on falling:")[2]
    first, last = (
        re.search(r"^ +([\d.]+) \|\*", curve, re.MULTILINE),
        re.findall(r"^ +([\d.]+) \|", curve, re.MULTILINE)[-1],
    )
    assert first is not None
    assert float(last) < float(first[1]) / 10
    marks = re.findall(r"^ +([RNC]) .+, at step (\d+)$", curve, re.MULTILINE)
    assert [sign for sign, _ in marks] == ["R", "N", "C"]
    assert 12 <= int(marks[0][1]) <= int(marks[1][1]) <= int(marks[2][1]) <= 160
    assert "10 jobs accepted, 10 succeeded, 0 lost;\n160 of 160 training steps made" in transcript
    assert re.search(r"^intact: \d+ entries", transcript, re.MULTILINE)


@alone
def test_it_ends_with_what_to_try_next(transcript: str) -> None:
    assert "No process of the demo is left" in transcript
    assert "What to try next:" in transcript.splitlines()[-9]
    assert "shoal run -- " in transcript


@alone
def test_the_readmes_transcript_is_what_it_says(transcript: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("<!-- transcript")[2].partition("<!-- end of transcript -->")[0]
    lines = [line for line in shown.splitlines()[1:] if line.strip() and not line.startswith("```")]
    printed = {plain(re.sub(rf"\b{getpass.getuser()}\b", "root", line)) for line in transcript.splitlines()}
    assert len(lines) > 10
    assert [line for line in lines if line != "..." and plain(line) not in printed] == []


def plain(line: str) -> str:
    """Return the line without what differs between runs: numbers and their width."""
    return re.sub(r"\s+", " ", re.sub(r"\d+", "0", line)).strip()


@contextmanager
def running(place: Path, until: str) -> Iterator[subprocess.Popen[str]]:
    """A demo that has printed `until`."""
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


def wait_for(true: Callable[[], bool], description: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, f"never: {description}"
        time.sleep(0.1)


@pytest.mark.soak
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "=== 3") as demo:
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert "interrupted; everything the demo started was stopped and removed" in output
    assert list((tmp_path / "tmp").iterdir()) == []
    wait_for(lambda: pids_with(str(tmp_path)) == [], "nothing runs any more")


@pytest.mark.soak
def test_remains_of_a_killed_demo_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, "=== 3") as demo:
        demo.kill()
    left = next((tmp_path / "tmp").glob(f"{PREFIX}*"))
    assert pids_with(str(left)) != []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with a_stage() as stage:
        assert not left.exists()
        assert pids_with(str(left)) == []
        assert stage.home.parent.exists()
    assert f"an earlier demo was interrupted: stopping what runs in {left}" in capfd.readouterr().out
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_demo_that_still_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with a_stage() as first, a_stage() as second:
        assert first.home.parent.exists()
        assert second.home.parent.exists()
