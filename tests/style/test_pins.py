"""A release is installed with the versions that were tested, from files known by their hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("cluster", "objects", "postgres", "stacks")
PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    found = (PIN.match(line) for line in lines)
    return {canonical(match["name"]): match["version"] for match in found if match}


def test_release_pins_are_the_tested_versions() -> None:
    tested = pins("constraints.txt")
    assert {
        name: tested.get(name, version) for name, version in pins("deploy/requirements.txt").items()
    } == pins("deploy/requirements.txt"), "run scripts/pins"


def test_every_dependency_of_a_release_has_a_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for e in EXTRAS for one in project["optional-dependencies"][e])]
    names = {canonical(re.split(r"[\[><=;\s]", text, maxsplit=1)[0]) for text in wanted}
    assert names <= pins("deploy/requirements.txt").keys(), "run scripts/pins"


def test_every_pin_has_hashes_and_no_address() -> None:
    text = (ROOT / "deploy/requirements.txt").read_text()
    blocks = re.split(r"\n(?=[A-Za-z0-9])", text.partition("\n")[2])
    assert all("--hash=sha256:" in block for block in blocks)
    assert "://" not in text
