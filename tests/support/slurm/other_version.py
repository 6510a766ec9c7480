"""A Slurm of another version: its programs lie in a Debian of their own below one folder.

`SHOAL_TEST_SLURM_ROOT` names the folder (`make second-slurm` makes one). What runs from there sees this
machine's processes, networks, devices and /tmp, and else its own Debian; a keeper is started in this one.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "SHOAL_TEST_SLURM_ROOT"
BIND_MOUNTS = ("proc", "dev", "sys", "run", "tmp", "etc/hosts")
"""Seen from inside as from outside."""
INSIDE_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
START_S = 30.0
PROGRAMS = (
    *("sbatch", "squeue", "scontrol", "scancel", "sinfo", "srun", "sacct", "sacctmgr"),
    *("slurmctld", "slurmd", "slurmdbd", "munged"),
)
HOLD_SCRIPT = (
    'touch "$0/etc/hosts" "$0/etc/resolv.conf" && '
    # Nodes reach no name server, and Slurm 24.11 asks for names of addresses: ten seconds for each.
    'mount --bind /dev/null "$0/etc/resolv.conf" && '
    f'for name in {" ".join(BIND_MOUNTS)}; do mount --rbind "/$name" "$0/$name" || exit; done; '
    'exec chroot "$0" sleep infinity'
)


def chosen_root() -> Path | None:
    """None: Slurm is this machine's own."""
    named = os.environ.get(VARIABLE)
    return Path(named).resolve() if named else None


class SlurmRoot:
    """Blocking. Between `up` and `down` there are commands in `folder` that run in the other Debian."""

    def __init__(self, root: Path, folder: Path, mark: dict[str, str]) -> None:
        """`mark`: in the environment of what is started."""
        self._root = root
        self._environment = {**os.environ, **mark}
        self._folder = folder
        self._holder: subprocess.Popen[bytes] | None = None

    def up(self) -> None:
        arguments = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            HOLD_SCRIPT,
            str(self._root),
        ]
        self._holder = subprocess.Popen(arguments, env=self._environment, start_new_session=True)
        deadline = time.monotonic() + START_S
        while Path(f"/proc/{self._holder.pid}/root").readlink() != self._root:
            assert self._holder.poll() is None, f"nothing can be run from {self._root}"
            assert time.monotonic() < deadline, f"{self._root} is not entered within {START_S:g} s"
            time.sleep(0.02)
        self._folder.mkdir(parents=True, exist_ok=True)
        for name in PROGRAMS:
            [place] = [f"/{b}/{name}" for b in ("usr/bin", "usr/sbin") if (self._root / b / name).exists()]
            self._write(name, f"exec {' '.join(self.enter_command)} env PATH={INSIDE_PATH} {place}")
        out = f"nsenter --mount=/proc/{os.getpid()}/ns/mnt --"
        self._write("python-outside", f"exec {out} {sys.executable}")

    def down(self) -> None:
        if self._holder is not None:
            with contextlib.suppress(ProcessLookupError):
                self._holder.kill()
            self._holder.wait()

    @property
    def enter_command(self) -> list[str]:
        """Words before a command that is to run in the other Debian."""
        assert self._holder is not None
        return ["nsenter", f"--target={self._holder.pid}", "--mount", "--root", "--wd", "--"]

    @property
    def python(self) -> str:
        """What starts a keeper in this machine's own Debian, from the other."""
        return str(self._folder / "python-outside")

    def _write(self, name: str, line: str) -> None:
        path = self._folder / name
        path.write_text(f'#!/bin/sh\n{line} "$@"\n')
        path.chmod(0o755)
