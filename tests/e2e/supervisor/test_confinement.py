"""Walls and limits, each tried by a job that runs into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.runtime.confine.detect import detect
from shoal.runtime.files import spool
from shoal.wire import EndKind, Mount, TaskCredentials
from tests.support.runtime.confinement_modes import CGROUP, JOB_UID, MODES, needs
from tests.support.runtime.tasks import ATTEMPT_ID, StartTask, a_task_spec, pids_with, tasks_in, until

FULL = (CGROUP, "bubblewrap", "uid")


def test_confinement_in_force_is_described() -> None:
    walls = detect()
    assert any(word in walls for word in ("cgroup1", "cgroup2", "rlimits"))
    assert set(walls) <= {"cgroup1", "cgroup2", "rlimits", "affinity", "bubblewrap", "uid", "nftables"}


@pytest.mark.parametrize("confinement", MODES)
def test_whole_tree_is_gone_with_the_outcome(start: StartTask, confinement: tuple[str, ...]) -> None:
    mark = f"32.{os.getpid()}{abs(hash(confinement)) % 1000:03}"
    daemon = f"setsid sh -c 'trap \"\" TERM HUP; cd /; exec env -i setsid sleep {mark}' &"
    run = f"({daemon}) ; sleep {mark} & sleep 0.3; exit 4"
    task = start(a_task_spec(run=run, ranks_per_node=2, confinement=confinement, uid=JOB_UID))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 4), outcome
    assert pids_with(mark) == []
    assert not [path for path in spool.read_cgroups(task.task) if Path(path).exists()]


@pytest.mark.parametrize("confinement", MODES)
def test_exit_codes_and_signals_survive_every_confinement(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    for number, (run, expected) in enumerate(
        (("exit 137", (EndKind.EXITED, 137, None)), ("kill -9 $$", (EndKind.SIGNALED, None, 9)))
    ):
        task_spec = a_task_spec(
            attempt_id=f"{ATTEMPT_ID}{number}", run=run, confinement=confinement, uid=JOB_UID
        )
        outcome = start(task_spec).run()
        assert (outcome.kind, outcome.exit_code, outcome.signal) == expected, outcome


@needs(CGROUP)
@pytest.mark.parametrize("confinement", [(CGROUP,), FULL])
def test_job_over_its_memory_limit_is_out_of_memory(start: StartTask, confinement: tuple[str, ...]) -> None:
    run = "python -c 'x = bytearray(512 << 20); print(len(x))'"
    limits = {"cpus": 1.0, "memory_bytes": 64 << 20}
    task = start(a_task_spec(run=run, **limits, confinement=confinement, uid=JOB_UID))
    outcome = task.run()
    assert outcome.kind is EndKind.OUT_OF_MEMORY, outcome
    assert "ran out of memory" in outcome.message
    assert task.texts() == []


@needs(CGROUP)
def test_failed_rank_is_not_blamed_for_memory_that_setup_used_up(start: StartTask) -> None:
    setup = "python -c 'x = bytearray(512 << 20)'; echo $?"
    limits = {"cpus": 1.0, "memory_bytes": 64 << 20}
    task = start(a_task_spec(setup=setup, run="exit 3", **limits, confinement=FULL, uid=JOB_UID))
    outcome = task.run()
    assert (outcome.kind, outcome.exit_code) == (EndKind.EXITED, 3)
    assert "137" in task.texts("s")


def test_memory_limit_of_a_single_process_holds_without_cgroups(start: StartTask) -> None:
    run = "python -c 'x = bytearray(512 << 20); print(len(x))'"
    limits = {"cpus": 1.0, "memory_bytes": 128 << 20}
    task = start(a_task_spec(run=run, **limits, confinement=("rlimits", "affinity")))
    outcome = task.run()
    assert outcome.kind is EndKind.EXITED
    assert "MemoryError" in outcome.message


@needs(CGROUP)
def test_process_limit_stops_a_fork_bomb(start: StartTask) -> None:
    run = "for i in $(seq 50); do sleep 60 & done; echo all started"
    limits = {"cpus": 1.0, "max_processes": 10}
    task = start(a_task_spec(run=run, **limits, confinement=FULL, uid=JOB_UID))
    outcome = task.run()
    assert outcome.kind is EndKind.EXITED
    assert "fork" in outcome.message
    assert task.texts() == []


@needs(CGROUP)
def test_fork_bomb_is_killed_to_the_last_process(start: StartTask) -> None:
    mark = f"34.{os.getpid()}"
    run = f"bomb() {{ bomb | bomb & sleep {mark}; }}; bomb; wait"
    limits = {"cpus": 0.5, "max_processes": 64}
    task = start(a_task_spec(run=run, **limits, time_limit_s=1.0, grace_s=0.2, confinement=(CGROUP,)))
    assert task.run().kind in (EndKind.TIME_LIMIT, EndKind.EXITED)
    assert pids_with(mark) == []


@needs(CGROUP)
def test_cpu_quota_is_kept(start: StartTask) -> None:
    program = (
        "import os,time\nend=time.monotonic()+2\nwhile time.monotonic()<end: pass\nprint(sum(os.times()[:2]))"
    )
    task = start(a_task_spec(run=f'python -c "{program}"', cpus=0.25, confinement=(CGROUP,)))
    outcome = task.run()
    assert outcome.kind is EndKind.SUCCEEDED
    assert float(task.texts()[0]) < 1.0
    assert outcome.cpu_s is not None
    assert outcome.cpu_s < 1.2


def test_affinity_holds_without_cgroups(start: StartTask) -> None:
    run = "python -c 'import os; print(len(os.sched_getaffinity(0)))'"
    task = start(a_task_spec(run=run, cpus=1.0, confinement=("rlimits", "affinity")))
    task.run()
    assert task.texts() == ["1"]


@needs("bubblewrap", "uid")
def test_job_cannot_read_shoals_home_nor_another_jobs_directory(start: StartTask) -> None:
    other = start(a_task_spec(attempt_id=f"{ATTEMPT_ID}other"))
    (other.home / "shoal.db").write_text("state")
    (other.home / "shoal.db").chmod(0o644)
    (other.directory / "secret").write_text("not yours")
    run = (
        f"ls {other.home}; cat {other.home}/shoal.db; cat {other.directory}/secret; ls ..; id -u; touch mine"
    )
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID))
    task.run()
    assert task.texts() == ["spool", "stand-ins", "work", str(JOB_UID)]
    assert len(task.texts("e")) == 2
    assert (task.directory / "work" / "mine").stat().st_uid == JOB_UID


@needs("bubblewrap", "uid")
def test_job_sees_no_process_but_its_own(start: StartTask) -> None:
    credentials = TaskCredentials(proof_key="shs_hidden")
    run = "cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -c shs_; ls -d /proc/[0-9]* | wc -l"
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID), credentials)
    task.run()
    assert task.texts()[0] == "0"
    assert int(task.texts()[1]) < 8


@needs("uid")
def test_job_of_another_user_cannot_read_foreign_environments(start: StartTask) -> None:
    home = Path(subprocess.check_output(["mktemp", "-d", "/var/tmp/shoal.XXXXXX"], text=True).strip())
    with tasks_in(home / "home") as make:
        task = make(a_task_spec(run=f"cat /proc/{os.getpid()}/environ", confinement=("uid",), uid=JOB_UID))
        for path in (home, task.home, *task.directory.parents[:3], task.directory):
            path.chmod(0o711)
        outcome = task.run()
        assert outcome.kind is EndKind.EXITED, outcome
        assert "Permission denied" in outcome.message
    subprocess.run(["rm", "-r", str(home)], check=True)


@needs("uid")
def test_job_user_without_a_sandbox_cannot_list_shoals_home() -> None:
    place = Path(tempfile.mkdtemp(prefix="shoal", dir="/var/tmp"))
    place.chmod(0o711)
    with tasks_in(place / "home") as make:
        run = (
            "pwd; echo ok > x; cat x; ls .. ../.. /var/tmp/shoal*/home; cat ../task_spec.json ../lock ../log"
        )
        task = make(a_task_spec(run=run, confinement=("uid",), uid=JOB_UID))
        for path in (task.home, *task.directory.parents[:3], task.directory):
            path.chmod(0o700)
        assert task.run().kind is EndKind.EXITED
        assert task.texts() == [task.task.work, "ok"]
        assert task.home.stat().st_mode & 0o777 == 0o701
    shutil.rmtree(place)


@needs("uid")
def test_work_directory_out_of_the_users_reach_is_named(start: StartTask) -> None:
    outcome = start(a_task_spec(confinement=("uid",), uid=JOB_UID)).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "cannot pass through" in outcome.message


@needs(*FULL)
def test_job_has_no_privilege_and_can_gain_none(start: StartTask) -> None:
    run = "grep -E 'NoNewPrivs|CapEff|CapBnd|Groups' /proc/self/status; touch /etc/x /usr/x /x"
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID))
    task.run()
    values = dict(line.split(":") for line in task.texts())
    assert {name: value.strip() for name, value in values.items()} == {
        "Groups": "",
        "CapEff": "0" * 16,
        "CapBnd": "0" * 16,
        "NoNewPrivs": "1",
    }
    assert [text.split(": ")[-1] for text in task.texts("e")] == ["Read-only file system"] * 3


@needs("bubblewrap")
def test_root_inside_the_sandbox_has_no_capability(start: StartTask) -> None:
    task = start(
        a_task_spec(run="grep CapEff /proc/self/status; mount -t tmpfs x /mnt", confinement=("bubblewrap",))
    )
    assert task.run().kind is EndKind.EXITED
    assert task.texts()[0].endswith("0" * 16)


@needs("bubblewrap", "uid")
def test_jobs_preloaded_library_is_loaded_only_by_the_job(start: StartTask) -> None:
    env = {"LD_PRELOAD": "/no/such/library.so", "PYTHONPATH": "/nowhere"}
    task = start(a_task_spec(run="echo $PYTHONPATH", env=env, confinement=FULL, uid=JOB_UID))
    assert task.run().kind is EndKind.SUCCEEDED
    assert task.texts() == [f"{task.task.stand_ins}/hook:/nowhere"]
    assert "ld.so" in task.texts("e")[0]
    assert Path(task.task.errors).read_text() == ""


@needs("bubblewrap")
def test_tmp_is_private_and_removed(start: StartTask) -> None:
    name = f"shoal-private-{os.getpid()}"
    run = f"echo x > /tmp/{name} && cat /tmp/{name}; echo y > /dev/shm/{name} && cat /dev/shm/{name}; ls /run"
    task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID))
    task.run()
    assert task.texts() == ["x", "y"]
    assert not Path(f"/tmp/{name}").exists()
    assert not Path(task.task.scratch).exists()


@needs("bubblewrap", "uid")
def test_package_installed_for_editing_below_tmp_can_be_imported_and_not_written(start: StartTask) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as project:
        folder = Path(project)
        folder.chmod(0o755)
        (folder / "clone").mkdir()
        (folder / "clone" / "thing.py").write_text("print('imported')\n")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        [site] = (folder / "env" / "lib").glob("python3*/site-packages")
        (site / "thing.pth").write_text(f"{folder}/clone\n")
        record = site / "thing-1.dist-info" / "direct_url.json"
        record.parent.mkdir()
        record.write_text(f'{{"url": "file://{folder}/clone", "dir_info": {{"editable": true}}}}')
        run = f"python -c 'import thing'; touch {folder}/clone/x || echo no; ls /tmp"
        task = start(a_task_spec(run=run, confinement=FULL, uid=JOB_UID))
        task.run(SHOAL_PATH=f"{folder}/env/bin:/usr/bin:/bin")
        texts = task.texts()
        assert texts[:2] == ["imported", "no"]
        assert folder.name in texts


@needs("bubblewrap", "uid")
def test_mounts_appear_at_their_targets(start: StartTask) -> None:
    source = Path(subprocess.check_output(["mktemp", "-d", "/var/tmp/shoal.XXXXXX"], text=True).strip())
    source.chmod(0o777)
    (source / "set").write_text("data\n")
    mounts = (
        Mount(source=str(source), target="/data"),
        Mount(source=str(source), target="/srv/sets/first", is_read_only=True),
    )
    run = "cat /data/set /srv/sets/first/set; touch /data/new; touch /srv/sets/first/refused"
    task = start(a_task_spec(run=run, mounts=mounts, confinement=FULL, uid=JOB_UID))
    outcome = task.run()
    assert outcome.kind is EndKind.EXITED, outcome
    assert task.texts() == ["data", "data"]
    assert "Read-only" in outcome.message
    assert sorted(path.name for path in source.iterdir()) == ["new", "set"]
    subprocess.run(["rm", "-r", str(source)], check=True)


@needs("bubblewrap", "uid")
@pytest.mark.parametrize("source", ["/proc", "/", "/no/such/place", "CLOSED"])
def test_mount_of_a_hidden_directory_fails_the_setup(start: StartTask, tmp_path: Path, source: str) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    mounts = (Mount(source=source.replace("CLOSED", f"{closed}/inner"), target="/data"),)
    outcome = start(a_task_spec(run="ls /data", mounts=mounts, confinement=FULL, uid=JOB_UID)).run()
    assert (outcome.kind, outcome.started_at) == (EndKind.SETUP_FAILED, None)
    assert "mount source" in outcome.message


def test_mounts_without_bubblewrap_are_refused_and_not_ignored(start: StartTask) -> None:
    mounts = (Mount(source="/usr", target="/data"),)
    outcome = start(a_task_spec(mounts=mounts, confinement=())).run()
    assert outcome.kind is EndKind.SETUP_FAILED
    assert "bubblewrap" in outcome.message


@needs("bubblewrap")
def test_killed_supervisor_takes_its_sandbox_with_it(start: StartTask) -> None:
    mark = f"33.{os.getpid()}"
    task = start(
        a_task_spec(run=f"setsid sleep {mark} & echo ready; sleep {mark}", confinement=("bubblewrap",))
    )
    process = task.spawn()
    until(lambda: len(pids_with(mark)) >= 2, describe=task.describe)
    process.kill()
    process.wait(10)
    until(lambda: pids_with(mark) == [])


@pytest.mark.parametrize("confinement", MODES)
def test_caches_outlive_an_attempt_and_belong_to_one_project(
    start: StartTask, confinement: tuple[str, ...]
) -> None:
    """By bubblewrap, by users, or by neither. In the last case there are directories of their own,
    but no wall.
    """

    def texts(number: int, project: str, uid: int, run: str) -> list[str]:
        task_spec = a_task_spec(
            attempt_id=f"{ATTEMPT_ID}{number}",
            project=project,
            run=run,
            confinement=confinement,
            uid=uid,
            cache_max_bytes=1 << 30,
        )
        task = start(task_spec)
        outcome = task.run()
        assert outcome.kind is EndKind.SUCCEEDED, outcome
        return task.texts("o")

    write = "mkdir -p $HF_HUB_CACHE && echo weights > $HF_HUB_CACHE/model && echo $HF_HUB_CACHE"
    (place,) = texts(1, "vision", JOB_UID, write)
    assert texts(2, "vision", JOB_UID, "cat $HF_HUB_CACHE/model") == ["weights"]
    peek = f"cat {place}/model 2>/dev/null; ls $HF_HUB_CACHE 2>/dev/null; echo x > {place}/planted; echo done"
    texts_of_other = texts(3, "speech", JOB_UID + 1, peek)
    if {"bubblewrap", "uid"} & set(confinement):
        assert texts_of_other == ["done"]
        assert not Path(place, "planted").exists()
