"""What `make bench-engines` counts, on moments that are known."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from benchmarks.engines.commands import Command, Ledger, closest, parse, per_second, worst_second


@pytest.mark.parametrize(
    ("moments", "worst"),
    [
        ([], 0),
        ([5.0], 1),
        ([5.0, 6.0, 7.0], 1),  # exactly a second apart: never two in one
        ([5.9, 6.1, 6.8, 6.95], 3),  # over the border of a second, where two seconds of a clock have two each
        ([7.0, 5.0, 6.5, 5.5], 2),  # in any order
    ],
)
def test_worst_second_begins_anywhere(moments: list[float], worst: int) -> None:
    assert worst_second(moments) == worst


def test_closest_two_and_mean_rate() -> None:
    assert closest([9.0, 1.0, 3.5]) == 2.5
    assert closest([1.0]) is None
    assert per_second([1.0, 2.0, 3.0], 6.0) == 0.5
    assert per_second([], 0.0) == 0.0


def test_a_line_that_is_not_whole_yet_is_left_out() -> None:
    assert parse("squeue 5.5\nsbatch 6.25\nsque") == [Command("squeue", 5.5), Command("sbatch", 6.25)]


def test_a_wrapper_leaves_a_line_and_is_the_program_it_stands_for(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, ("cat",), "/usr/bin:/bin")
    before = time.time()
    words = [str(ledger.folder / "cat"), "-"]
    done = subprocess.run(words, input="as it was", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "as it was")
    [one] = ledger.read(before)
    assert (one.name, before <= one.at <= time.time()) == ("cat", True)
    assert ledger.read(time.time()) == []
