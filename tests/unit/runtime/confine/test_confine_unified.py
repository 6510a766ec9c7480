"""The cgroup of the ranks in a simulated tree of cgroup version 2 with the kernel's rules."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.runtime.confine import resource_limits
from shoal.runtime.confine.confinement import CannotConfine, Confinement
from shoal.runtime.confine.resource_limits import Hierarchy
from shoal.runtime.files import spool
from tests.support.runtime.tasks import a_task_spec

ALL = "cpuset cpu io memory pids"
BY_SLURM = "cpuset cpu memory"
"""The controllers that Slurm's `cgroup/v2` delegates. It never delegates pids."""


class Unified:
    """A tree in which a cgroup with processes, other than the root, cannot delegate controllers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fill(root, ALL)

    def add(self, place: str, hands_down: str) -> Path:
        path = self.root / place
        path.mkdir()
        self._fill(path, (path.parent / "cgroup.subtree_control").read_text())
        if hands_down:
            self.write(f"{path}/cgroup.subtree_control", " ".join(f"+{one}" for one in hands_down.split()))
        return path

    def write(self, path: str, text: str) -> None:
        """Write to a `cgroup.subtree_control`, like `write_cgroup_file`."""
        file = Path(path)
        folder, controllers = file.parent, {word.removeprefix("+") for word in text.split()}
        if not controllers <= set((folder / "cgroup.controllers").read_text().split()):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if folder != self.root and (folder / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        file.write_text(" ".join(sorted({*file.read_text().split(), *controllers})))

    def seen_from(self, place: Path) -> list[Hierarchy]:
        table = f"30 1 0:28 / {self.root} rw - cgroup2 cgroup2 rw\n"
        return resource_limits.parse_hierarchies(table, f"0::/{place.relative_to(self.root)}\n")

    def _fill(self, path: Path, controllers: str) -> None:
        (path / "cgroup.controllers").write_text(controllers)
        (path / "cgroup.subtree_control").write_text("")
        (path / "cgroup.procs").write_text("")


def a_task(root: Path, monkeypatch: pytest.MonkeyPatch, hands_down: str = BY_SLURM) -> Path:
    """The cgroup of a node agent that Slurm has started, with this process in it."""
    tree = Unified(root)
    tree.write(f"{root}/cgroup.subtree_control", ALL)
    for place in ("system.slice", "system.slice/slurmstepd.scope"):
        tree.add(place, ALL if place == "system.slice" else hands_down)
    job = "system.slice/slurmstepd.scope/job_7"
    for place in (job, f"{job}/step_0", f"{job}/step_0/user"):
        tree.add(place, hands_down)
    task = tree.add(f"{job}/step_0/user/task_0", "")
    (task / "cgroup.procs").write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(resource_limits, "write_cgroup_file", tree.write)
    monkeypatch.setattr(resource_limits, "hierarchies_here", lambda: tree.seen_from(task))
    return task


@pytest.mark.parametrize("hands_down", [BY_SLURM, ALL])
def test_ranks_of_a_job_of_slurms_are_where_slurm_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_down: str
) -> None:
    """The ranks must be below Slurm's cgroup of the task. Beside it they would outlive the job."""
    a_task(tmp_path, monkeypatch, hands_down)
    share = Confinement(a_task_spec(stays_in_cgroup=True), spool.SpoolTask(tmp_path), "/bin")
    assert share.cgroups == ()
    assert share.mechanisms[:2] == ("rlimits", "affinity")


def test_a_cgroup_of_version_2_that_ranks_would_have_to_leave_theirs_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_task(tmp_path, monkeypatch)
    order = a_task_spec(stays_in_cgroup=True, confinement=("cgroup2",))
    with pytest.raises(CannotConfine, match="is not delegated to us here"):
        Confinement(order, spool.SpoolTask(tmp_path), "/bin")


def test_task_that_need_not_stay_uses_the_nearest_delegating_cgroup_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(tmp_path, monkeypatch)
    share = Confinement(a_task_spec(), spool.SpoolTask(tmp_path), "/bin")
    [place] = map(Path, share.cgroups)
    assert place.parent == task.parents[3], "slurmstepd.scope, which has pids to hand down, and no processes"
