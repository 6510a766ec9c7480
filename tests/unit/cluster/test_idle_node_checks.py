"""The scripts that check whether a machine may leave, run here over fake Slurm commands."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cluster.machine import ScriptResult
from shoal.cluster.teardown import drain_step, quiesce_step, teardown_steps, undrain_step
from tests.support.fakes.machines import facts_of, three_hosts

SCONTROL = """\
#!/bin/sh
[ -e {folder}/is_up ] || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
case $* in
  'show config' | ping) ;;
  'show node c') [ -e {folder}/state ] || {{ echo 'Node c not found'; exit 1; }}
    echo 'NodeName=c Arch=x86_64'; echo "   State=$(cat {folder}/state) Weight=1"
    [ ! -e {folder}/reason ] || echo "   Reason=$(cat {folder}/reason) [root@2026-03-01T14:26:07]" ;;
  'show node '*) echo "Node $3 not found"; exit 1 ;;
  *state=drain*) echo "$*" >>{folder}/told; echo "$(cat {folder}/state)+DRAIN" >{folder}/state
    echo "${{4#*=}}" >{folder}/reason; [ ! -e {folder}/begins ] || cat {folder}/begins >>{folder}/jobs ;;
  *state=resume) echo "$*" >>{folder}/told; echo IDLE >{folder}/state; rm -f {folder}/reason ;;
  *state=undrain) echo "$*" >>{folder}/told; sed -i s/+DRAIN// {folder}/state
    grep -q DOWN {folder}/state || rm -f {folder}/reason ;;
  *) echo "$*" >>{folder}/told ;;
esac
"""
SQUEUE = """\
#!/bin/sh
[ -e {folder}/is_up ] || {{ echo 'Unable to contact slurm controller' >&2; exit 1; }}
[ -z "$SQUEUE_FORMAT" ] || {{ sed "s/^\\([0-9]\\)/${{SQUEUE_FORMAT%% *}} \\1/" {folder}/jobs; exit; }}
cat {folder}/jobs || exit 1
case $* in *completing*) if [ -e {folder}/ending ]; then cat {folder}/ending; rm {folder}/ending; fi ;; esac
"""


@dataclass
class Slurm:
    """Slurm's state of node c, and the updates it got."""

    folder: Path

    def says(self, state: str | None, jobs: str = "", *, is_up: bool = True) -> None:
        for name, text in (("state", state), ("jobs", jobs), ("is_up", "" if is_up else None)):
            (self.folder / name).unlink(missing_ok=True)
            if text is not None:
                (self.folder / name).write_text(text)

    def ends(self, script: str) -> tuple[int, str]:
        path = f"{self.folder}:{os.environ['PATH']}"
        done = subprocess.run(
            ["sh", "-c", script], env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60
        )
        return done.returncode, done.stderr

    @property
    def updates(self) -> list[str]:
        file = self.folder / "told"
        return (
            [line.partition("state=")[2] for line in file.read_text().splitlines()] if file.exists() else []
        )


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    for name, text in (("scontrol", SCONTROL), ("squeue", SQUEUE), ("systemctl", "#!/bin/sh\nexit 3\n")):
        (tmp_path / name).write_text(text.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    return Slurm(tmp_path)


def looked(slurm: Slurm, *, is_away: bool, is_forced: bool = False) -> bool:
    step = drain_step(three_hosts().hosts[2], three_hosts(), is_forced=is_forced, is_away=is_away)
    return slurm.ends(step.check)[0] == 0


def changed(slurm: Slurm, *, is_away: bool, is_forced: bool = False) -> tuple[int, str]:
    step = drain_step(three_hosts().hosts[2], three_hosts(), is_forced=is_forced, is_away=is_away)
    return slurm.ends(step.apply)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_node_without_jobs_is_drained_and_may_leave(slurm: Slurm, *, is_away: bool) -> None:
    slurm.says("IDLE*")
    assert not looked(slurm, is_away=is_away)
    assert changed(slurm, is_away=is_away) == (0, "")
    assert slurm.updates == ["drain reason=leaves"]
    assert looked(slurm, is_away=is_away)


@pytest.mark.parametrize("is_away", [False, True])
def test_a_node_with_jobs_takes_jobs_as_before(slurm: Slurm, *, is_away: bool) -> None:
    slurm.says("MIXED*", "7\n8\n")
    assert not looked(slurm, is_away=is_away)
    code, arguments = changed(slurm, is_away=is_away)
    assert (code, slurm.updates) == (1, []), "it is not even drained"
    assert arguments.splitlines() == [
        "Slurm's jobs 7, 8 run there; wait for them, or say --force: then they are queued again or lost",
        "hint: `scancel 7 8` on a",
    ]


@pytest.mark.parametrize("is_away", [False, True])
def test_a_job_that_begins_while_its_node_is_drained_has_the_drain_taken_back(
    slurm: Slurm, *, is_away: bool
) -> None:
    slurm.says("IDLE")
    (slurm.folder / "begins").write_text("7\n")
    code, arguments = changed(slurm, is_away=is_away)
    assert (code, slurm.updates) == (1, ["drain reason=leaves", "undrain"])
    assert "Slurm's job 7 runs there" in arguments
    assert "c was drained, and takes jobs as before" in arguments


@pytest.mark.parametrize(("reason", "expected"), [("bad fan", []), ("leaves", ["undrain"])])
def test_drain_by_another_user_stays(slurm: Slurm, reason: str, expected: list[str]) -> None:
    """A drain that an interrupted command left is taken back."""
    slurm.says("MIXED+DRAIN", "7\n")
    (slurm.folder / "reason").write_text(reason)
    woken = undrain_step(three_hosts().hosts[2], three_hosts())
    assert (slurm.ends(woken.check)[0] != 0) is bool(expected)
    assert changed(slurm, is_away=False)[0] == 1
    assert slurm.updates == expected
    assert slurm.ends(woken.check)[0] == 0
    slurm.says("MIXED+DRAIN", is_up=False)
    assert slurm.ends(woken.check)[0] != 0, "a Slurm that does not answer has not said so"


def test_a_dead_machine_that_was_drained_and_does_not_leave_is_down_as_before(slurm: Slurm) -> None:
    slurm.says("DOWN")
    assert changed(slurm, is_away=True)[0] == 0
    woken = undrain_step(three_hosts().hosts[2], three_hosts())
    assert slurm.ends(woken.check)[0] != 0
    assert slurm.ends(woken.apply)[0] == 0
    assert ((slurm.folder / "state").read_text().strip(), slurm.updates[1:]) == ("DOWN", ["undrain"])
    assert slurm.ends(woken.check)[0] == 0, "though Slurm goes on to give our reason"


@pytest.mark.parametrize(
    ("jobs", "expected", "hint"),
    [
        (
            "3 shoal-att_1.0\n",
            "Slurm's job 3 runs there; wait for it",
            "`shoal stop JOB` (`shoal queue` lists",
        ),
        ("3 shoal-att_1.0\n5 my job\n", "Slurm's jobs 3, 5 run there", "them), and `scancel 5` on a"),
        ("5 my job\n>9 not mine\n", "Slurm's job 5 runs there", "`scancel 5` on a"),
    ],
)
def test_refused_drain_says_how_to_end_the_jobs(slurm: Slurm, jobs: str, expected: str, hint: str) -> None:
    slurm.says("MIXED", jobs)
    answer = ScriptResult(1, "", changed(slurm, is_away=False)[1])
    assert answer.last_words.startswith(expected)
    assert "hint" not in answer.last_words
    assert hint in answer.hint


def test_ending_jobs_are_waited_for(slurm: Slurm) -> None:
    slurm.says("IDLE+COMPLETING")
    ending = slurm.folder / "ending"  # seen once, and then over
    ending.write_text("7\n")
    assert changed(slurm, is_away=False) == (0, "")
    assert slurm.updates == ["drain reason=leaves"]
    ending.write_text("7\n")
    assert slurm.ends(quiesce_step(three_hosts(), is_forced=False).apply) == (0, "")


@pytest.mark.parametrize("is_forced", [True, False])
def test_a_cluster_that_is_given_up_does_not_wait_for_machines_that_are_away(
    slurm: Slurm, *, is_forced: bool
) -> None:
    ending = slurm.folder / "ending"  # on the one that is away, say
    slurm.says("IDLE+COMPLETING")
    ending.write_text("7\n")
    step = quiesce_step(three_hosts(), is_forced=is_forced, away=three_hosts().hosts[2:])
    assert slurm.ends(step.apply) == (0, "")
    assert slurm.updates == (["down reason=leaves"] if is_forced else [])


def may_go(slurm: Slurm, *, is_forced: bool = False) -> bool:
    return slurm.ends(quiesce_step(three_hosts(), is_forced=is_forced).check)[0] == 0


def test_stopped_controller_does_not_count_as_no_jobs(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.shell.STATE_DIR", str(slurm.folder))
    stamp = slurm.folder / "started" / "slurmctld"
    stamp.parent.mkdir()
    stamp.write_text("with these files\n")
    slurm.says("IDLE", is_up=False)
    assert not may_go(slurm)
    assert may_go(slurm, is_forced=True)
    code, arguments = slurm.ends(quiesce_step(three_hosts(), is_forced=False).apply)
    result = ScriptResult(code, "", arguments)
    assert code == 1
    assert result.last_words.endswith("Slurm does not say which jobs run there")
    assert "`shoal cluster create --name lab` starts slurmctld" in result.hint
    assert "--force" in result.hint

    host = three_hosts().hosts[0]
    fact = facts_of([host], {"a": ("own cluster lab", "own started slurmctld")})[host.address]
    (stop,) = [
        s
        for s in teardown_steps(host, fact, has_packages_removed=False)
        if s.title == "slurmctld does not run"
    ]
    assert slurm.ends(stop.check)[0] == 1, "it crashed, and is stopped all the same"
    slurm.ends(stop.apply.partition("systemctl")[0])  # the rest would stop one of this machine's
    assert slurm.ends(stop.check)[0] == 0
    assert may_go(slurm), "Shoal itself stopped it, and was cut off"
    slurm.says("MIXED", "7\n")
    assert not may_go(slurm), "it runs again"


def test_unreachable_node_that_slurm_calls_down_may_leave(slurm: Slurm) -> None:
    slurm.says("DOWN*+DRAIN", "7\n")
    assert looked(slurm, is_away=True)
    assert not looked(slurm, is_away=False)
    slurm.says("IDLE+DRAIN+POWERED_DOWN", "7\n")
    assert not looked(slurm, is_away=True)


def test_forced_removal_leaves_jobs_of_an_unreachable_node_to_slurm(slurm: Slurm) -> None:
    slurm.says("MIXED*", "7\n")
    assert changed(slurm, is_away=True, is_forced=True) == (0, "")
    assert slurm.updates == ["drain reason=leaves", "down reason=leaves"]


@pytest.mark.parametrize("is_away", [False, True])
def test_silent_slurm_does_not_count_as_no_jobs(slurm: Slurm, *, is_away: bool) -> None:
    slurm.says("IDLE+DRAIN", is_up=False)
    assert not looked(slurm, is_away=is_away)
    assert changed(slurm, is_away=is_away)[0] == 1
    assert looked(slurm, is_away=is_away, is_forced=True)


def test_failed_squeue_does_not_count_as_no_jobs(slurm: Slurm) -> None:
    slurm.says("IDLE+DRAIN")
    (slurm.folder / "jobs").unlink()
    for is_away in (False, True):
        assert not looked(slurm, is_away=is_away)
        assert changed(slurm, is_away=is_away)[0] == 1  # at once: it is not waited for


def test_node_unknown_to_slurm_may_leave(slurm: Slurm) -> None:
    slurm.says(None, "7\n")
    assert looked(slurm, is_away=True)
