"""A real control plane on a laboratory's Slurm: connected, started and killed as people do."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.client.handles import JobHandle
from shoal.runtime import spool
from tests.support.real_plane import RealPlane
from tests.support.shares import SOURCE
from tests.support.slurm_lab import SlurmLab
from tests.support.witness import Witness


class SlurmPlane(RealPlane):
    def __init__(self, home: Path, lab: SlurmLab, *flags: str) -> None:
        super().__init__(home)
        self.witness = Witness(home.parent / "witness")
        """Of the jobs that `witness.job` describes."""
        self._flags = ("--listen", "127.0.0.1:0", "--mount-roots", str(home.parent), *flags)
        self.env |= {name: lab.environment[name] for name in ("SLURM_CONF", "PATH")}
        self.lab = lab
        self.shared = home.parent / "shared"

    def connect(self, *more: str) -> dict[str, object]:
        words = (
            "--as-root",
            "--python",
            self.lab.python,
            "--python-path",
            SOURCE,
            "--shared",
            str(self.shared),
            "--spool",
            str(self.home.parent / "spool"),
            *more,
        )
        done = self.command("connect", "slurm", *words, "--json")
        assert done.returncode == 0, done.stderr
        told: dict[str, object] = json.loads(done.stdout)
        return told

    def attempt(self, job: JobHandle) -> dict[str, Any]:
        """The present one."""
        return self.attempts(job)[-1]

    def supervisor(self, attempt: dict[str, Any], node: str) -> int:
        """The process that supervises the attempt's first share there; its parent is the keeper."""
        place = self.home.parent / "spool" / "spool" / "live" / attempt["attempt_id"] / node
        claim = spool.read_claim(spool.Share(place))
        assert claim is not None
        assert claim.pid in self.lab.pids_on(node)
        return claim.pid


def parent_of(pid: int) -> int:
    """0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def slurm_plane(home: Path, lab: SlurmLab, *flags: str) -> Iterator[SlurmPlane]:
    """One that is up; afterwards nothing of it runs."""
    plane = SlurmPlane(home, lab, *flags)
    plane.connect()
    plane.up()
    try:
        yield plane
    finally:
        plane.down()
