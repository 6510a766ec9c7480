"""What `shoal run` says about a job that does not do what its owner may expect."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.home import write_server_file
from shoal.cli.remarks import about, launcher_of
from tests.support.fake_server import job_view


class Told:
    def __init__(self, home: Path) -> None:
        self.home = home
        write_server_file(home, {"url": "http://127.0.0.1:5", "pid": 1, "path": "/srv/env/bin:/usr/bin"})

    def __call__(self, run: str = "python train.py", path: str = "", **env: str) -> Iterator[str]:
        return about(run, job_view(), env, self.home, {"PATH": path} if path else {})


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    return Told(tmp_path)


@pytest.mark.parametrize("name", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_activated_environment_that_jobs_do_not_have_is_named(told: Told, name: str) -> None:
    (text,) = told("true", "", **{name: "/home/ana/env"})
    assert "/home/ana/env, is not on the PATH of jobs" in text
    assert "`--env PATH=/home/ana/env/bin:/usr/bin:/bin`" in text


def test_an_environment_that_jobs_do_have_is_worth_no_word(told: Told) -> None:
    assert list(told(VIRTUAL_ENV="/srv/env")) == []
    assert list(told()) == []
    assert list(told("/home/ana/env/bin/python train.py", VIRTUAL_ENV="/home/ana/env")) == []
    assert list(told(VIRTUAL_ENV="/home/ana/env", path="/home/ana/env/bin")) == []


def test_environments_are_nothing_to_another_machine_or_a_script(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(about("true", job_view(), {"VIRTUAL_ENV": "/home/ana/env"}, None, {})) == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert list(told(VIRTUAL_ENV="/home/ana/env")) == []


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
    (text,) = about("/opt/bin/mpirun ./a.out", job, {}, None, {})
    assert "2 of it run on each node" in text
    assert "`--ranks-per-node 1`" in text
    job["request"]["ranks_per_node"] = 1
    assert list(about("/opt/bin/mpirun ./a.out", job, {}, None, {})) == []
