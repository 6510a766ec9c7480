"""Files and functions stay small enough to be read in one sitting, and are named for what is inside."""

from __future__ import annotations

import pytest

from tests.style import rules
from tests.style.tree import PACKAGE, ROOT, Module, modules

MAX_SOURCE_LINES = 600
MAX_TEST_LINES = 900
MAX_README_LINES = 150


@pytest.fixture(scope="module")
def source() -> list[Module]:
    outside = [folder for name in ("benchmarks", "examples") if (folder := ROOT / name).is_dir()]
    return [module for base in (PACKAGE, *outside) for module in modules(base)]


@pytest.fixture(scope="module")
def tests() -> list[Module]:
    return modules(ROOT / "tests")


def test_source_files_are_short(source: list[Module]) -> None:
    assert rules.long_files(source, MAX_SOURCE_LINES) == []


def test_test_files_are_short(tests: list[Module]) -> None:
    assert rules.long_files(tests, MAX_TEST_LINES) == []


def test_functions_are_short(source: list[Module], tests: list[Module]) -> None:
    assert rules.long_functions([*source, *tests]) == []


def test_the_readme_is_read_to_its_end() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert 0 < len(lines) <= MAX_README_LINES


def test_no_file_is_named_for_nothing_in_particular(source: list[Module], tests: list[Module]) -> None:
    assert rules.refused_names([*source, *tests]) == []


def test_every_module_says_what_it_is_for(source: list[Module], tests: list[Module]) -> None:
    empty_ones = [module for module in tests if not module.source.strip()]
    assert rules.without_docstring([*source, *(m for m in tests if m not in empty_ones)]) == []


def test_every_room_says_what_lives_there() -> None:
    rooms = [path for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))]
    assert [room.name for room in rooms if not (room / "__init__.py").is_file()] == []
