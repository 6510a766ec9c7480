"""Which process groups span a job, and what happens to a job that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake.scenario import VirtualClock
from shoal.runtime.supervisor.endings import SUCCEEDED, Ending
from shoal.runtime.supervisor.world_check import MAX_REPORTS_BYTES, PATIENCE_S, WorldCheck
from shoal.wire import EndKind, TaskSpec
from tests.support.runtime.tasks import a_task_spec

FAILED = Ending(kind=EndKind.EXITED, message="rank 0 exited with code 1", exit_code=1, rank=0)


class ReportingRanks:
    """A node whose ranks report process groups."""

    def __init__(self, folder: Path, task_spec: TaskSpec) -> None:
        self.clock = VirtualClock()
        self.logged: list[str] = []
        self.file = folder / "worlds"
        self.file.touch()
        self.processes: set[int] = set()
        confinement: Any = SimpleNamespace(uid=None, processes=lambda: self.processes)
        log: Any = SimpleNamespace(add_message=self.logged.append)
        self.worlds = WorldCheck(task_spec, str(folder), confinement, self.clock, log)

    def report(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)


def lines(*groups: tuple[int, int, int]) -> str:
    """Return one line for each (rank of the job, group size, rank in the group)."""
    return "".join(f"{rank} 0 {world} {member} 0.1 torch\n" for rank, world, member in groups)


@pytest.fixture
def two_by_two(tmp_path: Path) -> ReportingRanks:
    return ReportingRanks(tmp_path, a_task_spec(nodes=("node-1", "node-2"), ranks_per_node=2))


@pytest.mark.parametrize(
    ("nodes", "each", "groups", "is_whole"),
    [
        (2, 2, [(0, 4, 0), (1, 4, 1)], True),
        (2, 2, [(0, 2, 0), (1, 2, 1)], False),
        (2, 2, [(0, 1, 0), (1, 1, 0)], False),
        (2, 2, [(0, 1, 0), (0, 4, 0), (1, 4, 1)], True),
        (2, 1, [(0, 8, 0), (0, 8, 1), (0, 8, 2), (0, 8, 3)], True),
        (2, 1, [(0, 4, 0), (0, 4, 1), (0, 4, 2), (0, 4, 3)], False),
        (1, 4, [(0, 8, m) for m in range(8)] + [(1, 8, m) for m in range(8)], False),
        (1, 4, [(r, 8, 2 * r + m) for r in range(4) for m in range(2)], True),
        (1, 2, [(0, 2, 0), (1, 2, 1)], True),
        (2, 2, [(0, 8, m) for m in range(4)] + [(1, 8, m) for m in range(4, 8)], False),
    ],
)
def test_group_spans_the_job_by_its_size_and_members(
    tmp_path: Path, nodes: int, each: int, groups: list[tuple[int, int, int]], *, is_whole: bool
) -> None:
    names = tuple(f"node-{number}" for number in range(1, nodes + 1))
    ranks = ReportingRanks(tmp_path, a_task_spec(nodes=names, ranks_per_node=each))
    ranks.report(lines(*groups))
    end = ranks.worlds.judge(SUCCEEDED, 0)
    assert end.kind is (EndKind.SUCCEEDED if is_whole else EndKind.SPLIT_WORLD)
    assert ranks.worlds.world is not None
    assert ranks.worlds.world.is_whole is is_whole


CHECK = [(0, 4, 0), (1, 4, 1)]
LAUNCHED = "other-launcher"


@pytest.mark.parametrize(
    ("later", "is_whole"),
    [
        pytest.param([(0, 2, 0), (0, 2, 1), (1, 2, 0), (1, 2, 1)], False, id="each rank trains by itself"),
        pytest.param([(0, 2, 0), (1, 2, 1)], False, id="each node trains by itself"),
        pytest.param([(0, 4, 0), (1, 4, 1)], True, id="all ranks train together"),
        pytest.param([(0, 1, 0)], True, id="one rank evaluates"),
    ],
)
def test_groups_behind_other_launchers_count_if_all_ranks_end_in_them(
    two_by_two: ReportingRanks, later: list[tuple[int, int, int]], *, is_whole: bool
) -> None:
    two_by_two.report(lines(*CHECK) + lines(*later).replace("torch", LAUNCHED))
    end = two_by_two.worlds.judge(SUCCEEDED, 0)
    assert end.kind is (EndKind.SUCCEEDED if is_whole else EndKind.SPLIT_WORLD)
    two_by_two.report(lines(*CHECK))
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_later_groups_of_a_program_are_allowed_after_one_of_all_ranks(
    two_by_two: ReportingRanks,
) -> None:
    two_by_two.report(lines(*CHECK, (0, 1, 0), (1, 1, 0)))
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_ranks_without_a_process_group_are_allowed(two_by_two: ReportingRanks) -> None:
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED
    assert two_by_two.worlds.world is None


def test_failure_message_says_that_ranks_did_not_work_together(two_by_two: ReportingRanks) -> None:
    assert two_by_two.worlds.judge(FAILED, 0) is FAILED
    two_by_two.report(lines((0, 2, 0), (1, 2, 0)))
    end = two_by_two.worlds.judge(FAILED, 0)
    assert (end.kind, end.exit_code) == (EndKind.EXITED, 1)
    assert "rank 0 exited with code 1; the 4 ranks of the job did not work together" in end.message


def test_job_with_world_any_may_form_separate_groups(tmp_path: Path) -> None:
    ranks = ReportingRanks(tmp_path, a_task_spec(ranks_per_node=2, may_split_world=True))
    ranks.report(lines((0, 1, 0), (1, 1, 0)))
    assert ranks.worlds.judge(SUCCEEDED, 0) is SUCCEEDED
    assert ranks.worlds.world is not None
    assert ranks.worlds.world.size == 1


def test_only_rank_of_a_job_may_form_any_group(tmp_path: Path) -> None:
    ranks = ReportingRanks(tmp_path, a_task_spec())
    ranks.report(lines((0, 1, 0)))
    assert ranks.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_small_groups_end_the_job_if_no_larger_one_follows(
    two_by_two: ReportingRanks,
) -> None:
    two_by_two.report(lines((0, 1, 0)))
    assert two_by_two.worlds.check(0) is None
    two_by_two.clock.advance(2 * PATIENCE_S)
    assert two_by_two.worlds.check(0) is None, "the other rank may still join"
    two_by_two.report(lines((1, 1, 0)))
    two_by_two.clock.advance(1)
    assert two_by_two.worlds.check(0) is None
    assert len(two_by_two.logged) == 1, "the log names it at once"
    two_by_two.clock.advance(PATIENCE_S)
    end = two_by_two.worlds.check(0)
    assert end is not None
    assert end.kind is EndKind.SPLIT_WORLD


def test_groups_of_an_earlier_start_say_nothing_about_the_next(two_by_two: ReportingRanks) -> None:
    two_by_two.report(lines((0, 1, 0), (1, 1, 0)))
    assert two_by_two.worlds.judge(SUCCEEDED, 1) is SUCCEEDED
    assert two_by_two.worlds.judge(SUCCEEDED, 0).kind is EndKind.SPLIT_WORLD


@pytest.mark.parametrize(
    "text",
    ["\xff\x00\n", "0 0 1 0\n", "a b c d e f\n", "0 0 -1 0 0.1 t\n", "0 0 1 7 0.1 t\n", "0 0 1 0 0.1 torch"],
)
def test_malformed_line_is_skipped(two_by_two: ReportingRanks, text: str) -> None:
    two_by_two.report(text)
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_file_of_a_job_is_read_up_to_a_limit(two_by_two: ReportingRanks) -> None:
    with two_by_two.file.open("wb") as file:
        file.truncate(1 << 40)
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED
    two_by_two.file.unlink()
    two_by_two.file.touch()
    two_by_two.report("\n" * MAX_REPORTS_BYTES + lines((0, 1, 0)))
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_very_many_small_groups_do_not_hide_one_that_spans_the_job(two_by_two: ReportingRanks) -> None:
    small = lines((0, 1, 0))
    two_by_two.report(small * (MAX_REPORTS_BYTES // len(small) + 1) + lines((0, 4, 0), (1, 4, 1)))
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_link_in_place_of_the_report_file_is_not_followed(two_by_two: ReportingRanks, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(lines((0, 1, 0)))
    two_by_two.file.unlink()
    two_by_two.file.symlink_to(tmp_path / "secret")
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED
    two_by_two.file.unlink()
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


@pytest.mark.parametrize("is_allowed", [True, False])
def test_launcher_with_processes_of_its_own_is_found(
    two_by_two: ReportingRanks, tmp_path: Path, *, is_allowed: bool
) -> None:
    script = tmp_path / "torchrun"
    script.write_text("import sys; print('up', flush=True); sys.stdin.read()")
    process = subprocess.Popen(
        [sys.executable, str(script), "--nproc-per-node", "2", "train.py"],
        env={"SHOAL_LAUNCHER": "torchrun"} if is_allowed else {},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        worlds = two_by_two.worlds
        two_by_two.processes |= {process.pid, os.getpid()}
        for _ in range(2):
            worlds.check(0)
            two_by_two.clock.advance(1)
        end = worlds.judge(SUCCEEDED, 0)
        assert end.kind is (EndKind.SUCCEEDED if is_allowed else EndKind.SPLIT_WORLD)
        assert ("`torchrun` started processes of its own" in end.message) is not is_allowed
        two_by_two.report(lines((0, 4, 0), (1, 4, 1)))
        assert worlds.judge(SUCCEEDED, 0) is SUCCEEDED, "it formed one group of all ranks"
        process.stdin.close()


def test_two_launchers_in_one_rank_fail_the_job_though_a_group_spans_it(two_by_two: ReportingRanks) -> None:
    two_by_two.report(lines((0, 4, 0), (1, 4, 1)) + "1 0 1 0 0.0 second-launcher\n")
    for end in (two_by_two.worlds.check(0), two_by_two.worlds.judge(SUCCEEDED, 0)):
        assert end is not None
        assert end.kind is EndKind.SPLIT_WORLD
        assert "rank 1 started a launcher or a program while another one was still running" in end.message
    assert two_by_two.worlds.judge(SUCCEEDED, 1) is SUCCEEDED


REFUSED = "1 0 1 0 0.0 refused-launcher\n"


@pytest.mark.parametrize("nodes", [("node-1",), ("node-1", "node-2")])
def test_refused_launcher_that_the_script_ignores_fails_the_job(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    ranks = ReportingRanks(tmp_path, a_task_spec(nodes=nodes, ranks_per_node=1))
    ranks.report(REFUSED)
    end = ranks.worlds.judge(SUCCEEDED, 0)
    assert end.kind is EndKind.SPLIT_WORLD
    assert "rank 1 started a launcher that was refused" in end.message
    assert "`shoal logs` of the job says why and what to write" in end.message
    assert ranks.worlds.judge(FAILED, 0) is FAILED, "the failed rank explains the end"
    assert ranks.worlds.judge(SUCCEEDED, 1) is SUCCEEDED


def test_refused_launcher_of_a_process_without_its_variables_fails_the_job_in_each_round(
    two_by_two: ReportingRanks,
) -> None:
    two_by_two.report("-1 -1 1 0 0.0 refused-launcher\n")
    for rendezvous_round in (0, 3):
        end = two_by_two.worlds.judge(SUCCEEDED, rendezvous_round)
        assert end.kind is EndKind.SPLIT_WORLD
        assert end.message.startswith("a rank started a launcher that was refused")


def test_refused_launcher_is_forgiven_if_the_ranks_work_together(two_by_two: ReportingRanks) -> None:
    two_by_two.report(REFUSED + lines((0, 4, 0), (1, 4, 1)))
    assert two_by_two.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_refused_launcher_is_forgiven_if_the_only_rank_forms_a_group(tmp_path: Path) -> None:
    ranks = ReportingRanks(tmp_path, a_task_spec(nodes=("node-1",), ranks_per_node=1))
    ranks.report(REFUSED + lines((0, 1, 0)))
    assert ranks.worlds.judge(SUCCEEDED, 0) is SUCCEEDED


def test_refused_launcher_is_forgiven_in_a_job_of_separate_groups(tmp_path: Path) -> None:
    ranks = ReportingRanks(tmp_path, a_task_spec(ranks_per_node=2, may_split_world=True))
    ranks.report(REFUSED)
    assert ranks.worlds.judge(SUCCEEDED, 0) is SUCCEEDED
