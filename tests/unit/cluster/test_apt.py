"""Package scripts, run here over a fake dpkg and apt."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shoal.cluster import apt

DPKG = """\
#!/bin/sh
shift 2
for name; do cat {folder}/state/$name 2>/dev/null; done
"""
APT = """\
#!/bin/sh
echo "$*" >>{folder}/typed
"""


class Packages:
    """The installed packages with dpkg's state letters, and the calls of apt."""

    def __init__(self, folder: Path, **states: str) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        for name, text in (("dpkg-query", DPKG), ("apt-get", APT)):
            (folder / name).write_text(text.format(folder=folder))
            (folder / name).chmod(0o755)
        for name, state in states.items():
            (folder / "state" / name).write_text(f"{state} \n")

    def code(self, script: str) -> int:
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", script], env=path, check=False).returncode

    def typed(self, verb: str) -> list[list[str]]:
        lines = [line.split() for line in (self.folder / "typed").read_text().splitlines()]
        return [line[line.index(verb) + 1 :] for line in lines if verb in line]


@pytest.fixture(autouse=True)
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(apt, "STATE_DIR", str(tmp_path))
    for name in ("_LOG", "_APT"):
        monkeypatch.setattr(apt, name, getattr(apt, name).replace("/var/lib/shoal-cluster", str(tmp_path)))
    return tmp_path / "packages"


def test_held_package_counts_as_installed(tmp_path: Path) -> None:
    here = Packages(tmp_path, munge="ii", mariadb="hi", slurmd="rc")
    assert here.code(apt.are_installed(["munge", "mariadb"])) == 0
    assert here.code(apt.are_installed(["munge", "slurmd"])) == 1
    assert here.code(apt.is_in_state("slurmd mariadb", apt.INSTALLED)) == 0


def test_only_missing_packages_are_installed_and_recorded(tmp_path: Path, record: Path) -> None:
    here = Packages(tmp_path, munge="ii", mariadb="hi", slurmd="rc")
    assert here.code(apt.install(["munge", "mariadb", "slurmd", "slurmctld"])) == 0
    assert here.typed("install") == [["--no-install-recommends", "--no-remove", "slurmd", "slurmctld"]]
    assert record.read_text().split() == ["slurmd", "slurmctld"]


def test_held_package_is_neither_upgraded_nor_removed(tmp_path: Path) -> None:
    here = Packages(tmp_path, munge="ii", mariadb="hi")
    assert here.code(apt.upgrade(["munge", "mariadb"])) == 0
    assert here.typed("install")[-1][-2:] == ["--no-remove", "munge"]
    assert here.code(apt.remove_packages(["munge", "mariadb"])) == 0
    assert here.typed("remove")[-1] == ["munge"]
