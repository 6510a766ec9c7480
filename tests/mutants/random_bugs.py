"""`python -m tests.mutants.random_bugs --seed 1 --count 20 [ROOM...]`: plant random bugs; what notices them?

A bug changes one operator (a comparison, a boolean or an arithmetic one), removes a `not`, or drops one call
whose result is not used. The seed decides which. Each bug is tried in a copy of the tree against the fast
suites of its own room; a suite that fails or hangs has caught it. Survivors are printed with their line.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.mutants.run import PYTEST, REPO, copy_tree

TIMEOUT_S = 300.0
FAST = ("-m", "not slow and not serial and not engines and not soak", "-p", "no:randomly")
ROOMS: dict[str, tuple[str, ...]] = {
    "control": ("tests/unit/control", "tests/sim/test_simulation.py"),
    "model": ("tests/unit/model", "tests/property/test_moves.py", "tests/unit/control"),
    "runtime": ("tests/unit/runtime",),
    "scheduler": ("tests/unit/scheduler", "tests/property", "tests/golden/explanations"),
    "serving": ("tests/unit/serving", "tests/property", "tests/contract/data_plane"),
    "spec": ("tests/unit/spec", "tests/golden/spec", "tests/property"),
    "store": ("tests/unit/store", "tests/contract/stores"),
}
"""The suites of a room that run without an engine, the most likely to notice first."""
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
HARMLESS_CALLS = frozenset({"debug", "info", "warning", "error", "exception", "log"})
"""A log line more or less is no bug that a suite should notice."""


class RandomBug(NamedTuple):
    path: str
    """Below `src/shoal`."""
    line: int
    start: int
    end: int
    """The bytes of the file that are replaced."""
    new: str

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def bugs_in(path: str, source: str) -> Iterator[RandomBug]:
    """Every bug that one change can make in this file, in the order of the text."""
    line_starts = [0]
    for line in source.encode().split(b"\n"):
        line_starts.append(line_starts[-1] + len(line) + 1)
    tree = ast.parse(source)
    inside_fstrings = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        # Positions inside f-strings are those of the whole string before Python 3.12.
        if id(node) in inside_fstrings:
            continue
        for changed in _changed(node):
            assert isinstance(node, ast.expr | ast.stmt)
            start = line_starts[node.lineno - 1] + node.col_offset
            end = line_starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            yield RandomBug(path, node.lineno, start, end, changed)


def _changed(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            if other := OPERATORS.get(type(operator)):
                operators = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                yield f"({ast.unparse(ast.Compare(node.left, operators, node.comparators))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BoolOp):
        yield f"({ast.unparse(ast.BoolOp(OPERATORS[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        yield f"({ast.unparse(ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"bool({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if not (isinstance(called, ast.Attribute) and called.attr in HARMLESS_CALLS):
            yield "pass"


def _is_text(node: ast.BinOp) -> bool:
    """Texts that are added fail with any other operator: that is no test of a suite."""
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
        for part in (node.left, node.right)
    )


def choose(room: str, seed: int, count: int) -> list[RandomBug]:
    folder = REPO / "src" / "shoal" / room
    bugs = [
        bug
        for path in sorted(folder.rglob("*.py"))
        if "migrations" not in path.parts
        for bug in bugs_in(str(path.relative_to(folder.parent)), path.read_text(encoding="utf-8"))
    ]
    return random.Random(f"{room} {seed}").sample(bugs, min(count, len(bugs)))


def ordered_suites(room: str, bug: RandomBug | None) -> list[str]:
    """The room's test files, those that name the changed module first."""
    files = [
        file
        for place in ROOMS[room]
        for file in ([REPO / place] if place.endswith(".py") else sorted((REPO / place).rglob("test_*.py")))
    ]
    stem = Path(bug.path).stem if bug else ""
    return [
        str(file.relative_to(REPO))
        for file in sorted(files, key=lambda file: f"{stem} import" not in file.read_text(encoding="utf-8"))
    ]


def is_caught(tree: Path, room: str, bug: RandomBug | None) -> bool:
    """Whether a suite fails, or does not end within `TIMEOUT_S`."""
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, *PYTEST, *FAST, *ordered_suites(room, bug)],
        cwd=tree,
        env=env,
        stdout=(tree / "suites.out").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(TIMEOUT_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def try_bugs(tree: Path, room: str, seed: int, count: int) -> tuple[int, int]:
    """The number of bugs caught, and tried."""
    bugs, num_caught = choose(room, seed, count), 0
    for bug in bugs:
        file = tree / "src" / "shoal" / bug.path
        source = file.read_bytes()
        file.write_bytes(bug.planted(source))
        began = time.monotonic()
        caught = is_caught(tree, room, bug)
        num_caught += caught
        word = "caught  " if caught else "SURVIVED"
        print(f"  {word}  {bug.path}:{bug.line}  {time.monotonic() - began:.0f} s", flush=True)
        if not caught:
            old = source[bug.start : bug.end].decode()
            for sign, text in (("-", old), ("+", bug.new)):
                print(f"            {sign} {' '.join(text.split())[:150]}")
        file.write_bytes(source)
    return num_caught, len(bugs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all if none is named"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=20, help="bugs in each room")
    options = parser.parse_args()
    if unknown := set(options.rooms) - set(ROOMS):
        parser.error(f"no such rooms: {', '.join(sorted(unknown))}; there are {', '.join(ROOMS)}")
    shares = dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="shoal-random-bugs-") as scratch:
        tree = Path(scratch) / "tree"
        copy_tree(tree)
        for room in options.rooms or ROOMS:
            print(f"== {room}", flush=True)
            if is_caught(tree, room, None):
                print((tree / "suites.out").read_text(errors="replace")[-3000:])
                print(f"FAILED: the suites of {room} fail without a bug, so they catch nothing")
                return 1
            num_caught, num_tried = try_bugs(tree, room, options.seed, options.count)
            shares[room] = f"{num_caught} of {num_tried} caught ({num_caught / max(1, num_tried):.0%})"
    for room, share in shares.items():
        print(f"{room:10} {share}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
