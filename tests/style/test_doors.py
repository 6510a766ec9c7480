"""The folder names are the architecture: these tests keep the doors between rooms."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.style import rules
from tests.style.tree import PACKAGE, ROOT, Module, modules


@pytest.fixture(scope="module")
def source() -> list[Module]:
    return modules(PACKAGE)


def test_every_room_imports_only_rooms_below_it(source: list[Module]) -> None:
    assert rules.closed_doors(source) == []


def test_functions_take_the_capabilities_that_they_use_and_not_all_of_the_control_plane(
    source: list[Module],
) -> None:
    assert rules.takers_of_core(source) == []


def test_every_room_has_been_given_its_doors(source: list[Module]) -> None:
    assert rules.unknown_rooms(source) == []


def test_no_engine_imports_another(source: list[Module]) -> None:
    assert rules.engines_that_see_each_other(source) == []


def test_imports_stand_at_the_top_of_a_file(source: list[Module]) -> None:
    assert rules.imports_inside_functions(source) == []


def test_pure_rooms_import_nothing_that_waits_or_surprises(source: list[Module]) -> None:
    assert rules.impurities(source) == []


def test_rooms_that_are_handed_a_clock_read_no_other(source: list[Module]) -> None:
    assert rules.clock_readings(source) == []


def test_torch_is_imported_by_runtime_alone(source: list[Module]) -> None:
    assert rules.torch_imports(source) == []


def test_runtime_starts_without_the_dependencies_of_the_control_plane(source: list[Module]) -> None:
    assert rules.worker_weight(source) == []


def test_import_linter_agrees_that_doors_point_down() -> None:
    """The linter also sees chains through a third module, which the rules above do not."""
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_and_the_linter_know_the_same_rooms() -> None:
    """A room in one table and not in the other would be guarded by half."""
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    layers = pyproject.partition("layers = [")[2].partition("\n]")[0]
    words = {word.strip('()",') for word in layers.replace("|", " ").split()}
    assert words == set(rules.MAY_SEE)
