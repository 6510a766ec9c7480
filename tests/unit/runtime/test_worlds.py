"""Which process groups span a job, and what becomes of one that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engines.fake.clock import VirtualClock
from shoal.runtime.ending import SUCCEEDED, Ending
from shoal.runtime.worlds import MAX_BYTES, PATIENCE_S, Worlds
from shoal.wire import EndKind, Order
from tests.support.shares import an_order

FAILED = Ending(kind=EndKind.EXITED, message="rank 0 exited with code 1", exit_code=1, rank=0)


class Told:
    """A node whose ranks report."""

    def __init__(self, folder: Path, order: Order) -> None:
        self.clock = VirtualClock()
        self.said: list[str] = []
        self.file = folder / "worlds"
        self.file.touch()
        self.processes: set[int] = set()
        nobody: Any = SimpleNamespace(uid=None, processes=lambda: self.processes)
        log: Any = SimpleNamespace(say=self.said.append)
        self.worlds = Worlds(order, str(folder), nobody, self.clock, log)

    def say(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)


def lines(*groups: tuple[int, int, int]) -> str:
    """(rank of the job, world, member) of each process."""
    return "".join(f"{rank} 0 {world} {member} 0.1 torch\n" for rank, world, member in groups)


@pytest.fixture
def two_by_two(tmp_path: Path) -> Told:
    return Told(tmp_path, an_order(nodes=("node-1", "node-2"), ranks_per_node=2))


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
def test_group_spans_the_job_or_does_not(
    tmp_path: Path, nodes: int, each: int, groups: list[tuple[int, int, int]], *, is_whole: bool
) -> None:
    names = tuple(f"node-{number}" for number in range(1, nodes + 1))
    told = Told(tmp_path, an_order(nodes=names, ranks_per_node=each))
    told.say(lines(*groups))
    end = told.worlds.judged(SUCCEEDED, 0)
    assert end.kind is (EndKind.SUCCEEDED if is_whole else EndKind.SPLIT_WORLD)
    assert told.worlds.world is not None
    assert told.worlds.world.is_whole is is_whole


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
def test_groups_behind_other_launchers_count_where_all_ranks_end_up_in_them(
    two_by_two: Told, later: list[tuple[int, int, int]], *, is_whole: bool
) -> None:
    two_by_two.say(lines(*CHECK) + lines(*later).replace("torch", LAUNCHED))
    end = two_by_two.worlds.judged(SUCCEEDED, 0)
    assert end.kind is (EndKind.SUCCEEDED if is_whole else EndKind.SPLIT_WORLD)
    two_by_two.say(lines(*CHECK))
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_groups_that_programs_form_by_themselves_after_one_of_all_ranks_are_meant(two_by_two: Told) -> None:
    two_by_two.say(lines(*CHECK, (0, 1, 0), (1, 1, 0)))
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_ranks_that_form_no_group_are_left_alone(two_by_two: Told) -> None:
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED
    assert two_by_two.worlds.world is None


def test_failure_is_explained_by_ranks_that_did_not_work_together(two_by_two: Told) -> None:
    assert two_by_two.worlds.judged(FAILED, 0) is FAILED
    two_by_two.say(lines((0, 2, 0), (1, 2, 0)))
    end = two_by_two.worlds.judged(FAILED, 0)
    assert (end.kind, end.exit_code) == (EndKind.EXITED, 1)
    assert "rank 0 exited with code 1; the 4 ranks of the job did not work together" in end.message


def test_job_that_wants_separate_groups_gets_them(tmp_path: Path) -> None:
    told = Told(tmp_path, an_order(ranks_per_node=2, may_split_world=True))
    told.say(lines((0, 1, 0), (1, 1, 0)))
    assert told.worlds.judged(SUCCEEDED, 0) is SUCCEEDED
    assert told.worlds.world is not None
    assert told.worlds.world.size == 1


def test_only_rank_of_a_job_may_form_what_it_likes(tmp_path: Path) -> None:
    told = Told(tmp_path, an_order())
    told.say(lines((0, 1, 0)))
    assert told.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_groups_that_are_too_small_end_the_job_once_nothing_larger_follows(two_by_two: Told) -> None:
    two_by_two.say(lines((0, 1, 0)))
    assert two_by_two.worlds.look(0) is None
    two_by_two.clock.advance(2 * PATIENCE_S)
    assert two_by_two.worlds.look(0) is None, "the other rank may still come"
    two_by_two.say(lines((1, 1, 0)))
    two_by_two.clock.advance(1)
    assert two_by_two.worlds.look(0) is None
    assert len(two_by_two.said) == 1, "the log says it at once"
    two_by_two.clock.advance(PATIENCE_S)
    end = two_by_two.worlds.look(0)
    assert end is not None
    assert end.kind is EndKind.SPLIT_WORLD


def test_groups_of_an_earlier_start_say_nothing_about_the_next(two_by_two: Told) -> None:
    two_by_two.say(lines((0, 1, 0), (1, 1, 0)))
    assert two_by_two.worlds.judged(SUCCEEDED, 1) is SUCCEEDED
    assert two_by_two.worlds.judged(SUCCEEDED, 0).kind is EndKind.SPLIT_WORLD


@pytest.mark.parametrize(
    "text",
    ["\xff\x00\n", "0 0 1 0\n", "a b c d e f\n", "0 0 -1 0 0.1 t\n", "0 0 1 7 0.1 t\n", "0 0 1 0 0.1 torch"],
)
def test_line_that_makes_no_sense_is_passed_over(two_by_two: Told, text: str) -> None:
    two_by_two.say(text)
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_file_of_a_job_is_read_up_to_a_limit(two_by_two: Told) -> None:
    with two_by_two.file.open("wb") as file:
        file.truncate(1 << 40)
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED
    two_by_two.file.unlink()
    two_by_two.file.touch()
    two_by_two.say("\n" * MAX_BYTES + lines((0, 1, 0)))
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_small_groups_beyond_number_do_not_hide_one_that_spans_the_job(two_by_two: Told) -> None:
    small = lines((0, 1, 0))
    two_by_two.say(small * (MAX_BYTES // len(small) + 1) + lines((0, 4, 0), (1, 4, 1)))
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_link_that_a_job_puts_there_is_not_followed(two_by_two: Told, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(lines((0, 1, 0)))
    two_by_two.file.unlink()
    two_by_two.file.symlink_to(tmp_path / "secret")
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED
    two_by_two.file.unlink()
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


@pytest.mark.parametrize("is_allowed", [True, False])
def test_launcher_that_started_processes_of_its_own_is_found(
    two_by_two: Told, tmp_path: Path, *, is_allowed: bool
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
            worlds.look(0)
            two_by_two.clock.advance(1)
        end = worlds.judged(SUCCEEDED, 0)
        assert end.kind is (EndKind.SUCCEEDED if is_allowed else EndKind.SPLIT_WORLD)
        assert ("`torchrun` started processes of its own" in end.message) is not is_allowed
        two_by_two.say(lines((0, 4, 0), (1, 4, 1)))
        assert worlds.judged(SUCCEEDED, 0) is SUCCEEDED, "it formed one group of all ranks"
        process.stdin.close()


def test_two_launchers_in_one_rank_fail_the_job_though_a_group_spans_it(two_by_two: Told) -> None:
    two_by_two.say(lines((0, 4, 0), (1, 4, 1)) + "1 0 1 0 0.0 second-launcher\n")
    for end in (two_by_two.worlds.look(0), two_by_two.worlds.judged(SUCCEEDED, 0)):
        assert end is not None
        assert end.kind is EndKind.SPLIT_WORLD
        assert "rank 1 started a launcher or a program while another one was still running" in end.message
    assert two_by_two.worlds.judged(SUCCEEDED, 1) is SUCCEEDED


REFUSED = "1 0 1 0 0.0 refused-launcher\n"


@pytest.mark.parametrize("nodes", [("node-1",), ("node-1", "node-2")])
def test_refused_launcher_that_the_script_passes_over_fails_the_job(
    tmp_path: Path, nodes: tuple[str, ...]
) -> None:
    told = Told(tmp_path, an_order(nodes=nodes, ranks_per_node=1))
    told.say(REFUSED)
    end = told.worlds.judged(SUCCEEDED, 0)
    assert end.kind is EndKind.SPLIT_WORLD
    assert "rank 1 started a launcher that was refused" in end.message
    assert "`shoal logs` of the job says why and what to write" in end.message
    assert told.worlds.judged(FAILED, 0) is FAILED, "a rank that ends with its code has said it"
    assert told.worlds.judged(SUCCEEDED, 1) is SUCCEEDED


def test_refused_launcher_is_forgiven_where_the_ranks_work_together(two_by_two: Told) -> None:
    two_by_two.say(REFUSED + lines((0, 4, 0), (1, 4, 1)))
    assert two_by_two.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_refused_launcher_is_forgiven_where_the_only_rank_forms_a_group(tmp_path: Path) -> None:
    told = Told(tmp_path, an_order(nodes=("node-1",), ranks_per_node=1))
    told.say(REFUSED + lines((0, 1, 0)))
    assert told.worlds.judged(SUCCEEDED, 0) is SUCCEEDED


def test_refused_launcher_is_forgiven_in_a_job_of_separate_groups(tmp_path: Path) -> None:
    told = Told(tmp_path, an_order(ranks_per_node=2, may_split_world=True))
    told.say(REFUSED)
    assert told.worlds.judged(SUCCEEDED, 0) is SUCCEEDED
