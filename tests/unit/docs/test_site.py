"""The site of the documentation (`make docs`): its navigation and its picture, without building it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import yaml

from tests.style.tree import ROOT

DOCS = ROOT / "docs"
FROM_THE_ROOT = {"index.md", "contributing.md", "changes.md"}
"""README, CONTRIBUTING and CHANGELOG, which `scripts/docs_site.py` adds."""


def pages_in(nav: object) -> Iterator[str]:
    """Every page of a navigation, however deep."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for below in nav.values():
            yield from pages_in(below)
    elif isinstance(nav, list):
        for below in nav:
            yield from pages_in(below)


def test_every_page_is_in_the_navigation_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(pages_in(nav)) == sorted(there | FROM_THE_ROOT)


def test_every_decision_is_in_the_list_of_decisions() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    decisions = [page.name for page in (DOCS / "decisions").glob("0*.md")]
    assert [name for name in decisions if f"]({name})" not in listed] == []


def test_committed_picture_is_what_its_script_draws() -> None:
    script = ROOT / "scripts" / "draw_architecture.py"
    drawn = subprocess.run([sys.executable, script, "-"], capture_output=True, text=True, check=True).stdout
    assert (DOCS / "pictures" / "architecture.svg").read_text(encoding="utf-8") == drawn
