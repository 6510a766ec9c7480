"""The program that slurmd runs every minute, run by a shell beside a Slurm on paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.engines.slurm.states import RUNNING, SUSPENDED
from tests.support.node_health import NodeHealth

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
    """Beside a Slurm on paper."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "a")
        self.make("scontrol", SCONTROL.format(folder=folder))
        self.make("squeue", SQUEUE.format(folder=folder))
        (folder / "jobs").mkdir()

    def fails(self, name: str, text: str) -> None:
        """That program does this in place of its work."""
        self.make(name, f"#!/bin/sh\n{text}\n")

    def lives(self, job: int, state: str, group: str = SCOPE, *, is_first_over: bool = False) -> None:
        """A process of that job. `is_first_over`: its first thread has ended, another has not."""
        inside = f"{group}/job_{job}/step_0/user/task_0"
        self.thread(job, job, "/" if is_first_over else inside)
        self.thread(job, job + 1000, inside)
        if state:
            self.job_is(job, state)

    def job_is(self, job: int, state: str) -> None:
        (self.folder / "jobs" / str(job)).write_text(f"{job} {state.lower()}\n")

    def says(self, node: str) -> list[str]:
        """What it tells Slurm where that has this to say of the node."""
        (self.folder / "node").write_text(node)
        (self.folder / "said").unlink(missing_ok=True)
        self.run({"PATH": "/usr/bin:/bin"})
        said = self.folder / "said"
        return said.read_text().splitlines() if said.exists() else []


@pytest.fixture
def health(tmp_path: Path) -> Health:
    return Health(tmp_path)


def test_what_is_wrong_drains_the_node_and_what_shoal_drained_comes_back(health: Health) -> None:
    assert health.says(f"{FINE}Comment=(null)") == []
    health.is_full(True)
    [said] = health.says(FINE)
    assert said.startswith("update nodename=a state=drain reason=shoal: ")
    [said] = health.says(f"{FINE}Reason=once seen [root@2026-11-16T18:11:18]")
    assert "state=drain" in said, "it takes work"
    assert len(health.says(DRAINED)) == 1
    assert health.says("") == [], "whose word stands there nobody knows"
    health.is_full(False)
    assert health.says(DRAINED) == [RESUMED]


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN"])
def test_the_word_of_whoever_else_closed_the_node_stands(health: Health, state: str, is_full: bool) -> None:
    health.is_full(is_full)
    assert health.says(f"NodeName=a State={state} X=1 Reason=Kill task failed [root@x]") == []
    assert health.says(f"NodeName=a State={state} X=1 Reason=not by shoal: x [ana@x]") == []


@pytest.mark.parametrize("state", ["CANCELLED", "COMPLETED", "NODE_FAIL", ""])
@pytest.mark.parametrize(
    "group", [SCOPE, "/system.slice/a_slurmstepd.scope", "/slurm/uid_1000", "/lxc/1/slurm_a/uid_0"]
)
def test_a_node_where_something_of_a_job_that_is_over_lives_does_not_come_back(
    health: Health, state: str, group: str
) -> None:
    health.lives(6, "RUNNING", group)
    health.lives(7, state, group)
    [said] = health.says(DRAINED)
    told = "shoal: Kill task failed: job 7 is over, and something of it lives"
    assert said == f"update nodename=a state=drain reason={told}"
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
def test_a_control_group_that_is_not_slurms_keeps_no_node_away(health: Health, group: str) -> None:
    health.lives(99, "", group)
    assert health.says(DRAINED) == [RESUMED]


def test_a_job_of_which_only_a_longer_number_goes_on_is_over(health: Health) -> None:
    health.lives(17, "RUNNING")
    health.lives(7, "")
    [said] = health.says(DRAINED)
    assert "Kill task failed: job 7 is over" in said


def test_a_process_whose_first_thread_has_ended_may_have_another_that_does_not_die(health: Health) -> None:
    health.lives(7, "CANCELLED", "/slurm/uid_1000", is_first_over=True)
    [said] = health.says(DRAINED)
    assert "Kill task failed: job 7 is over" in said


@pytest.mark.parametrize("state", sorted(RUNNING | SUSPENDED | {"CONFIGURING"}))
def test_what_lives_of_a_job_that_is_not_over_keeps_no_node_away(health: Health, state: str) -> None:
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
def test_who_could_not_look_or_ask_resumes_nothing(health: Health, name: str, does: str) -> None:
    health.lives(7, "RUNNING")
    health.fails(name, does)
    assert health.says(DRAINED)[-1:] != [RESUMED]


def test_threads_that_end_while_they_are_looked_at_keep_no_node_away(health: Health) -> None:
    told = ("cat: /proc/7/task/7/cgroup: No such process", "find: /proc/8/task: No such file or directory")
    health.fails("find", f"echo 0::/; echo '{told[0]}' >&2; echo '{told[1]}' >&2; exit 1")
    assert health.says(DRAINED) == [RESUMED]
