"""Where ranks may be in a tree of cgroups of version 2, which keeps the kernel's rules on paper."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shoal.runtime import spool
from shoal.runtime.confine import cgroup, cgroup2
from shoal.runtime.confine.cgroup import Hierarchy
from shoal.runtime.confine.confinement import CannotConfine, Confinement
from tests.support.shares import an_order

ALL = "cpuset cpu io memory pids"
BY_SLURM = "cpuset cpu memory"
"""What Slurm's `cgroup/v2` hands down, whatever it was given: never pids."""


class Unified:
    """A child has what its parent hands down; who has processes, and is not the root, hands nothing down."""

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
        """As `cgroup.write` to a `cgroup.subtree_control`."""
        file = Path(path)
        folder, asked = file.parent, {word.removeprefix("+") for word in text.split()}
        if not asked <= set((folder / "cgroup.controllers").read_text().split()):
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if folder != self.root and (folder / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        file.write_text(" ".join(sorted({*file.read_text().split(), *asked})))

    def seen_from(self, place: Path) -> list[Hierarchy]:
        table = f"30 1 0:28 / {self.root} rw - cgroup2 cgroup2 rw\n"
        return cgroup.hierarchies(table, f"0::/{place.relative_to(self.root)}\n")

    def _fill(self, path: Path, controllers: str) -> None:
        (path / "cgroup.controllers").write_text(controllers)
        (path / "cgroup.subtree_control").write_text("")
        (path / "cgroup.procs").write_text("")


def a_task(root: Path, monkeypatch: pytest.MonkeyPatch, hands_down: str = BY_SLURM) -> Path:
    """The cgroup of a keeper that Slurm has started, in which this process now is."""
    tree = Unified(root)
    tree.write(f"{root}/cgroup.subtree_control", ALL)
    for place in ("system.slice", "system.slice/slurmstepd.scope"):
        tree.add(place, ALL if place == "system.slice" else hands_down)
    job = "system.slice/slurmstepd.scope/job_7"
    for place in (job, f"{job}/step_0", f"{job}/step_0/user"):
        tree.add(place, hands_down)
    task = tree.add(f"{job}/step_0/user/task_0", "")
    (task / "cgroup.procs").write_text(f"{os.getpid()}\n")
    monkeypatch.setattr(cgroup2, "write", tree.write)
    monkeypatch.setattr(cgroup, "here", lambda: tree.seen_from(task))
    return task


@pytest.mark.parametrize("hands_down", [BY_SLURM, ALL])
def test_ranks_of_a_job_of_slurms_are_where_slurm_looks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands_down: str
) -> None:
    """In the task's own cgroup: beside it they would outlive the job, whose end is taken for theirs."""
    a_task(tmp_path, monkeypatch, hands_down)
    share = Confinement(an_order(stays_in_cgroup=True), spool.Share(tmp_path), "/bin")
    assert share.cgroups == ()
    assert share.words[:2] == ("rlimits", "affinity")


def test_a_cgroup_of_version_2_that_ranks_would_have_to_leave_theirs_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_task(tmp_path, monkeypatch)
    order = an_order(stays_in_cgroup=True, confinement=("cgroup2",))
    with pytest.raises(CannotConfine, match="is not delegated to us here"):
        Confinement(order, spool.Share(tmp_path), "/bin")


def test_who_need_not_stay_has_the_nearest_cgroup_above_that_may_hand_controllers_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = a_task(tmp_path, monkeypatch)
    share = Confinement(an_order(), spool.Share(tmp_path), "/bin")
    [place] = map(Path, share.cgroups)
    assert place.parent == task.parents[3], "slurmstepd.scope, which has pids to hand down, and no processes"
