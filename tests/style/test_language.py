"""Names and prose stay readable: unique class names, and less dialect each time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.style import language
from tests.style.tree import PACKAGE, ROOT, Module, modules

CEILING_FILE = Path(__file__).with_name("ceilings.json")
"""How many constructions of the old dialect each room may still have. The numbers only fall:
`SHOAL_GOLDEN=write pytest tests/style/test_language.py` writes lower ones down, and never higher ones."""
CALLBACKS = frozenset({"ShoalCallback"})
"""One for each library, imported from the module that is named for it, as every library's users expect."""
CHECKED = ("src", "tests", "benchmarks", "examples")


def checked_modules(part: str) -> list[Module]:
    return modules(PACKAGE if part == "src" else ROOT / part)


def current_counts() -> dict[str, int]:
    """By room: dialect constructions in prose, and variables that are named for nothing."""
    counts = dict[str, int]()
    for part in CHECKED:
        for room, found_here in language.banned_counts(checked_modules(part)).items():
            counts[f"{part}/{room} prose"] = sum(found_here.values())
        if part != "src":
            counts[f"{part} names"] = len(language.empty_names(checked_modules(part)))
    return {name: count for name, count in sorted(counts.items()) if count}


def test_no_variable_in_src_is_named_for_how_its_value_came_here() -> None:
    assert language.empty_names(checked_modules("src")) == []


def test_public_class_name_has_one_meaning() -> None:
    assert language.shared_class_names(checked_modules("src"), CALLBACKS) == []


def test_dialect_only_decreases() -> None:
    ceilings: dict[str, int] = json.loads(CEILING_FILE.read_text(encoding="utf-8"))
    counts = current_counts()
    if os.environ.get("SHOAL_GOLDEN") == "write":
        lower = {name: min(count, ceilings.get(name, 0)) for name, count in counts.items()}
        CEILING_FILE.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")
    above = {name: count for name, count in counts.items() if count > ceilings.get(name, 0)}
    assert above == {}, "write it in plain words: see the ten rules in CONTRIBUTING.md"


@pytest.mark.parametrize(
    "source, count",
    [
        ("told = 1\n", 1),
        ("def f(who, asked): ...\n", 1),
        ("x = [known for known in y]\n", 1),
        ("lambda words: 0\n", 1),
        ("message = told_at = 1\n", 0),
    ],
)
def test_empty_name_is_noticed(source: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(source, encoding="utf-8")
    assert len(language.empty_names(modules(tmp_path))) == count


def test_dialect_is_noticed_in_prose_and_not_in_code(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""Nobody goes on."""\nnobody = 1  # whoever comes anew\n', encoding="utf-8"
    )
    [counts] = language.banned_counts(modules(tmp_path)).values()
    assert counts == {"nobody": 1, "runs on": 1, "whoever": 1, "anew": 1}
