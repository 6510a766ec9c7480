"""A planted bug that no longer fits the code would be `caught` by nobody and missed by nobody."""

from __future__ import annotations

import pytest

from tests.mutants.planted import MUTANTS
from tests.mutants.planted.mutant import Mutant
from tests.mutants.run import REPO, SUITES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_planted_bug_still_fits_the_code_exactly_once(mutant: Mutant) -> None:
    text = (REPO / "src" / "shoal" / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert changed != text
    compile(changed, mutant.file, "exec")


def test_every_planted_bug_names_suites_that_exist() -> None:
    assert {suite for mutant in MUTANTS for suite in mutant.suites} == set(SUITES)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 12


def test_every_suite_names_tests_that_exist() -> None:
    paths = [word for words in SUITES.values() for word in words if word.startswith("tests/")]
    assert paths
    assert [path for path in paths if not (REPO / path).exists()] == []
