"""Notes of `shoal run` on a job that does not do what its owner may expect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.control_plane.home import write_server_file
from shoal.cli.jobs.submit import job_notes, launcher_of
from tests.support.fakes.api_server import job_view


class Told:
    def __init__(self, home: Path) -> None:
        self.home = home
        write_server_file(home, {"url": "http://127.0.0.1:5", "pid": 1, "path": "/srv/env/bin:/usr/bin"})

    def __call__(self, run: str = "python train.py", path: str = "", **env: str) -> Iterator[str]:
        return job_notes(run, job_view(), env, self.home, {"PATH": path} if path else {})


@pytest.fixture
def notes_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return Told(tmp_path)


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_activated_environment_missing_from_the_path_of_jobs_is_named(notes_for: Told, name: str) -> None:
    (text,) = notes_for("true", "", **{name: "/home/ana/env"})
    assert "/home/ana/env is not on the PATH of jobs" in text
    assert "`--env PATH=/home/ana/env/bin:/usr/bin:/bin`" in text


def test_environment_on_the_path_of_jobs_prints_no_note(notes_for: Told) -> None:
    assert list(notes_for(VIRTUAL_ENV="/srv/env")) == []
    assert list(notes_for()) == []
    assert list(notes_for("/home/ana/env/bin/python train.py", VIRTUAL_ENV="/home/ana/env")) == []
    assert list(notes_for(VIRTUAL_ENV="/home/ana/env", path="/home/ana/env/bin")) == []


def test_environments_print_no_note_for_a_remote_server_or_a_script(
    notes_for: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(job_notes("true", job_view(), {"VIRTUAL_ENV": "/home/ana/env"}, None, {})) == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert list(notes_for(VIRTUAL_ENV="/home/ana/env")) == []


@pytest.mark.parametrize(
    ("run", "launcher"),
    [
        ("torchrun --nproc-per-node 2 train.py", None),
        ("OMP_NUM_THREADS=1 exec /opt/bin/mpiexec -n 2 ./a.out", "/opt/bin/mpiexec"),
        ("python3 -m torch.distributed.run train.py", None),
        ("/e/python3 -m torch.distributed.run t.py", None),
        ("/e/torchrun t.py", None),
        ("mpirun -n 2 ./a.out\necho done", None),
        ("python train.py", None),
        ("echo torchrun", None),
        ("echo 'open", None),
        ("", None),
    ],
)
def test_launchers_that_are_named_by_path_start_ranks_themselves(run: str, launcher: str | None) -> None:
    assert launcher_of(run) == launcher


def test_a_launcher_that_would_run_once_for_each_rank_is_named() -> None:
    job = job_view()
    job["request"]["ranks_per_node"] = 2
    (text,) = job_notes("/opt/bin/mpirun ./a.out", job, {}, None, {})
    assert "2 copies of it run on each node" in text
    assert "`--ranks-per-node 1`" in text
    job["request"]["ranks_per_node"] = 1
    assert list(job_notes("/opt/bin/mpirun ./a.out", job, {}, None, {})) == []
