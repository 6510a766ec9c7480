"""The health check that slurmd runs every minute, run by a shell beside a fake Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.slurm.states import RUNNING, SUSPENDED
from tests.support.fakes.machines import NodeHealth

FINE = "NodeName=a Arch=x86_64 State=IDLE Partitions=DRAINED,main "
DRAINED = "NodeName=a State=IDLE+DRAIN Reason=shoal: / is 99% full [root@x]"
RESUMED = "update nodename=a state=resume"
SCONTROL = """\
#!/bin/sh
case "$*" in
  "-o show node a") cat {folder}/node ;;
  *) echo "$*" >> {folder}/said ;;
esac
"""
SQUEUE = """\
#!/bin/sh
[ "$1 $2 $3 $4 $6 $7" = "-h -w a -t -o %A" ] || exit 2
cat {folder}/jobs/* 2>/dev/null | awk -v states=",$5," 'index(states, "," $2 ",") {{ print $1 }}'
"""
SCOPE = "/system.slice/slurmstepd.scope"


class Health(NodeHealth):
    """A health check beside a fake Slurm."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "a")
        self.write_program("scontrol", SCONTROL.format(folder=folder))
        self.write_program("squeue", SQUEUE.format(folder=folder))
        (folder / "jobs").mkdir()

    def fails(self, name: str, text: str) -> None:
        """Replace a program by this script."""
        self.write_program(name, f"#!/bin/sh\n{text}\n")

    def lives(self, job: int, state: str, group: str = SCOPE, *, is_first_over: bool = False) -> None:
        """Add a process of the job. `is_first_over`: its first thread has ended, another has not."""
        inside = f"{group}/job_{job}/step_0/user/task_0"
        self.add_thread(job, job, "/" if is_first_over else inside)
        self.add_thread(job, job + 1000, inside)
        if state:
            self.job_is(job, state)

    def job_is(self, job: int, state: str) -> None:
        (self.folder / "jobs" / str(job)).write_text(f"{job} {state.lower()}\n")

    def says(self, node: str) -> list[str]:
        """Run the health check while Slurm reports `node`, and return its updates of Slurm."""
        (self.folder / "node").write_text(node)
        (self.folder / "said").unlink(missing_ok=True)
        self.run({"PATH": "/usr/bin:/bin"})
        log = self.folder / "said"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def health(tmp_path: Path) -> Health:
    return Health(tmp_path)


def test_faults_drain_the_node_and_drains_of_shoal_are_resumed(health: Health) -> None:
    assert health.says(f"{FINE}Comment=(null)") == []
    health.set_disk_full(True)
    [update] = health.says(FINE)
    assert update.startswith("update nodename=a state=drain reason=shoal: ")
    [update] = health.says(f"{FINE}Reason=once seen [root@2026-11-16T18:11:18]")
    assert "state=drain" in update, "it takes work"
    assert len(health.says(DRAINED)) == 1
    assert health.says("") == [], "it is not known who drained it"
    health.set_disk_full(False)
    assert health.says(DRAINED) == [RESUMED]


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN"])
def test_drain_by_another_user_is_kept(health: Health, state: str, is_full: bool) -> None:
    health.set_disk_full(is_full)
    assert health.says(f"NodeName=a State={state} X=1 Reason=Kill task failed [root@x]") == []
    assert health.says(f"NodeName=a State={state} X=1 Reason=not by shoal: x [ana@x]") == []


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETED", "NODE_FAIL", ""])
@pytest.mark.parametrize(
    "group", [SCOPE, "/system.slice/a_slurmstepd.scope", "/slurm/uid_1000", "/lxc/1/slurm_a/uid_0"]
)
def test_node_with_live_processes_of_an_ended_job_is_not_resumed(
    health: Health, state: str, group: str
) -> None:
    health.lives(6, "RUNNING", group)
    health.lives(7, state, group)
    [update] = health.says(DRAINED)
    expected = "shoal: Kill task failed: job 7 is over, and something of it lives"
    assert update == f"update nodename=a state=drain reason={expected}"
    health.job_is(7, "COMPLETING")
    assert health.says(DRAINED) == [RESUMED]


@pytest.mark.parametrize(
    "group",
    [
        "/user.slice/user-1000.slice/user@1000.service",
        f"/user.slice/user-1000.slice/user@1000.service{SCOPE}",
        "/user.slice/user-1000.slice/user@1000.service/slurm/uid_1000",
        "/system.slice/ci.service",
        "/slurm",
    ],
)
def test_cgroup_that_is_not_slurms_does_not_keep_a_node_drained(health: Health, group: str) -> None:
    health.lives(99, "", group)
    assert health.says(DRAINED) == [RESUMED]


def test_job_number_that_prefixes_an_active_one_counts_as_over(health: Health) -> None:
    health.lives(17, "RUNNING")
    health.lives(7, "")
    [update] = health.says(DRAINED)
    assert "Kill task failed: job 7 is over" in update


def test_a_process_whose_first_thread_has_ended_may_have_another_that_does_not_die(health: Health) -> None:
    health.lives(7, "CANCELLED", "/slurm/uid_1000", is_first_over=True)
    [update] = health.says(DRAINED)
    assert "Kill task failed: job 7 is over" in update


@pytest.mark.parametrize("state", sorted(RUNNING | SUSPENDED | {"CONFIGURING"}))
def test_processes_of_an_active_job_do_not_keep_a_node_drained(health: Health, state: str) -> None:
    health.lives(7, state)
    assert health.says(DRAINED) == [RESUMED]


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("find", "exit 1"),
        ("find", "echo 0::/; exit 137"),
        ("find", "echo 0::/; echo 'find: /proc/7/task: Cannot allocate memory' >&2; exit 1"),
        ("find", "exec no-such-program"),
        ("awk", "exit 2"),
        ("squeue", "echo 7; exit 1"),
        ("squeue", "exec no-such-program"),
    ],
)
def test_health_check_that_cannot_look_resumes_nothing(health: Health, name: str, does: str) -> None:
    health.lives(7, "RUNNING")
    health.fails(name, does)
    assert health.says(DRAINED)[-1:] != [RESUMED]


def test_threads_that_end_during_the_check_do_not_keep_a_node_drained(health: Health) -> None:
    expected = (
        "cat: /proc/7/task/7/cgroup: No such process",
        "find: /proc/8/task: No such file or directory",
    )
    health.fails("find", f"echo 0::/; echo '{expected[0]}' >&2; echo '{expected[1]}' >&2; exit 1")
    assert health.says(DRAINED) == [RESUMED]
