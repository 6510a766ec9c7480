"""Files made to hurt the reader: each is refused at once, in bounded memory, with a sentence."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from shoal.errors import SpecError
from shoal.spec.files import MAX_FILE_BYTES, load_job, read_job

LEVELS = "abcdefghi"


def billion(leaf: str) -> str:
    """Nine levels of nine aliases each: 387 million values when written out."""
    lines = [f"{LEVELS[0]}: &{LEVELS[0]} [{', '.join([leaf] * 9)}]"]
    for below, here in pairwise(LEVELS):
        lines.append(f"{here}: &{here} [{', '.join([f'*{below}'] * 9)}]")
    return "\n".join(["run: x", *lines])


BOMBS = {
    "aliases of text": (billion("lol"), "too large"),
    "aliases of empty lists": (billion("[]"), "too large"),
    "aliases of empty mappings": (billion("{}"), "too large"),
    "one large text, many aliases": (
        "run: &r " + "x" * 200_000 + "\nsecrets: [" + "*r, " * 20_000 + "]",
        "too large",
    ),
    "nested lists": ("run: x\nenv: " + "[" * 100_000, "nested more than 32 levels deep"),
    "nested mappings": ("run: x\nenv: " + "{a: " * 100_000, "nested more than 32 levels deep"),
    "nested blocks": ("run: x\nenv:\n" + "- " * 100_000, "nested more than 32 levels deep"),
    "nested keys": ("run: x\n" + "? " * 100_000, "a key must be text"),
    "many keys": ("run: x\n" + "\n".join(f"k{n}: 1" for n in range(100_000)), "too large"),
    "many duplicates": ("run: x\n" * 15_000, "is written twice"),
    "many mistakes": ("run: x\n" + "\n".join(f"ru{n}: 1" for n in range(15_000)), "did you mean `run`?"),
    "many wrong mounts": (
        "run: x\nmounts:\n" + "\n".join(f"  {n}: 1" for n in range(15_000)),
        "more mistakes",
    ),
    "a huge whole number": ("run: x\npriority: " + "9" * 1_000_000, "must be a whole number"),
    "a huge exponent": ("run: x\ntime_limit: 1e999999999", "is not a number"),
    "a large amount": ("run: x\nresources: {memory: " + "9" * 900_000 + "GB}", "is not an amount"),
    "a large array": ("run: x\narray: 0..99999999999", "more than 10,000 elements"),
    "a long array text": ("run: x\narray: '" + "1-2," * 250_000 + "1'", "at most 131,072"),
    "a long regular expression": (
        "run: x\nlog_rules: [{action: exclude_node, match: '" + "(a*)*" * 150_000 + "'}]",
        "at most 1,000",
    ),
    "repeats of repeats": (
        "run: x\nlog_rules: {'" + "(?:" * 60 + "a" + "){1,9}" * 60 + "': retry}",
        "is not `exclude_node`",
    ),
    "half a surrogate pair": ('run: "\\ud800"', "not YAML"),
    "a long key": ("run: x\n? " + "k" * 900_000 + "\n: 1", "unknown key `kkk"),
    "a long line of quotes": ("run: x\nname: '" + "''" * 400_000, "not YAML"),
    "a long comment": ("run: x\n#" + "x" * 1_000_000 + "\n{", "not YAML"),
    "too many bytes": ("run: " + "x" * MAX_FILE_BYTES, "larger than 1,048,576 bytes"),
}


@pytest.mark.timeout(10)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str) -> None:
    text, message = BOMBS[name]
    with pytest.raises(SpecError) as refused:
        read_job(text.encode(), "job.yaml")
    problems = refused.value.problems
    assert any(message in problem for problem in problems), problems[:3]
    assert len(problems) <= 51
    assert all(len(problem) < 500 and problem.isprintable() for problem in problems)


CHILD = """
import resource, sys
from shoal.errors import SpecError
from shoal.spec.files import load_job
before = resource.getrusage(resource.RUSAGE_SELF)
resource.setrlimit(resource.RLIMIT_CPU, (int(before.ru_utime + before.ru_stime) + 2, resource.RLIM_INFINITY))
try:
    load_job(sys.argv[1])
except SpecError:
    after = resource.getrusage(resource.RUSAGE_SELF)
    print(after.ru_maxrss - before.ru_maxrss)
"""


@pytest.mark.parametrize(
    "name", ["aliases of empty lists", "nested lists", "many keys", "many mistakes", "too many bytes"]
)
def test_refusing_a_bomb_takes_little_memory_and_at_most_seconds_of_cpu(name: str, tmp_path: Path) -> None:
    """SIGXCPU kills the child if it computes for longer."""
    bomb = tmp_path / "job.yaml"
    bomb.write_text(BOMBS[name][0])
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(bomb)], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 128 << 10, "KiB more than before"


def test_a_device_that_never_ends_is_not_read_to_its_end() -> None:
    with pytest.raises(SpecError, match="larger than 1,048,576 bytes"):
        load_job("/dev/zero")
