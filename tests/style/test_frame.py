"""What surrounds the code: pinned dependencies, the commands people type, links that lead somewhere."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.style.tree import ROOT

TARGETS = {"demo", "test", "check", "bench", "soak", "sim"}
PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[0-9][A-Za-z0-9.]*")


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    return {_plain(line.partition("==")[0]): line.partition("==")[2] for line in lines}


def _plain(name: str) -> str:
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-bench.txt"])
def test_constraints_are_plain_versions(name: str) -> None:
    assert len(pins(name)) > 50


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = {_plain(re.split(r"[\[<>=!~;\s]", dependency)[0]) for dependency in asked}
    assert names - set(pins("constraints.txt")) == set()


def test_make_alone_prints_the_targets() -> None:
    shown = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"make (\w+) ", shown)) >= TARGETS


def test_ci_runs_all_parts_of_the_command_the_readme_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    [parts] = re.findall(r"^test: (.*?) ##", makefile, re.MULTILINE)
    script = (ROOT / ".ci" / "run").read_text()
    assert [part for part in parts.split() if not re.search(rf"\b{part}\b", script)] == []
    assert "$ make test" in (ROOT / "README.md").read_text()


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_the_documentation_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []
