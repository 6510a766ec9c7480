"""Random bugs are reproducible, fit the code, and change what it does."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.random_bugs import ROOMS, bugs_in, choose, ordered_suites
from tests.mutants.run import REPO

SOURCE = '''
def f(a, b, names):
    """Docs."""
    names.append(f"{a < b}")
    log.info("started")
    if a < b and not names:
        return a + b
    return "x" + "y"
'''


def test_each_kind_of_bug_is_found_once() -> None:
    changed = sorted(bug.planted(SOURCE.encode()).decode() for bug in bugs_in("f.py", SOURCE))
    assert len(changed) == len(set(changed)) == 5
    for source in changed:
        compile(source, "f.py", "exec")
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(SOURCE))
    texts = "\n".join(changed)
    for expected in ("(a <= b)", "(a - b)", "(a < b or not names)", "bool(names)", "    pass\n"):
        assert expected in texts


@pytest.mark.parametrize("room", ROOMS)
def test_bugs_of_a_room_are_the_same_for_the_same_seed_and_compile(room: str) -> None:
    bugs = choose(room, 1, 20)
    assert bugs == choose(room, 1, 20) != choose(room, 2, 20)
    for bug in bugs:
        source = (REPO / "src" / "shoal" / bug.path).read_bytes()
        compile(bug.planted(source), bug.path, "exec")


@pytest.mark.parametrize("room", ROOMS)
def test_suites_of_a_room_exist_and_begin_with_those_of_the_changed_module(room: str) -> None:
    for place in ROOMS[room]:
        assert (REPO / place).exists()
    bug = choose(room, 1, 1)[0]
    assert sorted(ordered_suites(room, bug)) == sorted(ordered_suites(room, None))
