"""The only file of this engine that runs a command: Slurm's own, here on a login node or over SSH on one."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence

import structlog

from shoal.engines.slurm.parse import SQUEUE_FORMAT
from shoal.errors import EngineRefused, EngineUnreachable

TIMEOUT_S = 30.0
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
SSH_FAILED = 255
AWAY = (
    "unable to contact slurm controller",
    "socket timed out",
    "zero bytes were transmitted",
    "connection refused",
    "communication connection failure",
    "unexpected message received",
    "transport endpoint",
    "resource temporarily unavailable",
    "slurm backup controller in standby mode",
    "munge",
)
"""In the words of a command that could not ask, or did not hear the answer."""
PASSING = ("temporarily", "accounting/qos policy", "submitjob", "job limit")
"""In the words of `sbatch`: not now, as long as others or other jobs of ours are in the way."""
NOT_RUN = (126, 127)
"""A shell's exit codes for a command that it could not find or start."""

log = structlog.get_logger()


class SlurmClient:
    """Blocking. Every method raises `EngineUnreachable` when Slurm could not be asked."""

    def __init__(self, ssh: str = "", ssh_options: Sequence[str] = ()) -> None:
        self._ssh = ssh
        self._ssh_options = ssh_options

    def submit(self, arguments: Sequence[str], script: str) -> str:
        """The job's id. The script goes over standard input. `EngineRefused`: for ever, in Slurm's own words;
        what may pass is `EngineUnreachable`.
        """
        code, told, said = self._run(["sbatch", *arguments], script)
        if code == 0:
            return told.strip().partition(";")[0]
        told = f"sbatch said: {said.strip()}"
        if code in NOT_RUN or any(words in said.lower() for words in PASSING):
            raise EngineUnreachable(told, hint="shoal doctor", code=code)
        raise EngineRefused(told, hint="shoal nodes", code=code)

    def jobs(self) -> str:
        """Every job of this user that Slurm remembers."""
        own = "--me" if self._ssh else f"--user={os.getuid()}"
        return self._ask(["squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", own])

    def nodes(self) -> str:
        return self._ask(["scontrol", "show", "node", "-o"])

    def topology(self) -> str:
        """Empty where Slurm has no tree of switches."""
        code, told, _ = self._run(["scontrol", "show", "topology", "-o"])
        return told if code == 0 else ""

    def cancel(self, name: str) -> None:
        """By name: an id may be somebody else's by now. What is not there is not an error."""
        code, _, said = self._run(["scancel", "--quiet", f"--name={name}"])
        if code != 0:
            log.warning("slurm.scancel_failed", name=name, code=code, said=said.strip())

    def version(self) -> str:
        return self._ask(["sinfo", "--version"]).strip()

    def uid(self) -> int:
        """Who jobs run as."""
        return int(self._ask(["id", "-u"])) if self._ssh else os.getuid()

    def _ask(self, command: list[str]) -> str:
        code, told, said = self._run(command)
        if code != 0:
            raise EngineUnreachable(
                f"{command[0]} failed: {said.strip() or told.strip()}", hint="shoal doctor"
            )
        return told

    def _run(self, command: list[str], given: str = "") -> tuple[int, str, str]:
        words = [*SSH, *self._ssh_options, self._ssh, shlex.join(command)] if self._ssh else command
        try:
            done = subprocess.run(
                words, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except FileNotFoundError:
            raise EngineUnreachable(
                f"there is no `{words[0]}` on this machine",
                hint="go to a login node, or name one with `--ssh`",
            ) from None
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineUnreachable(f"{command[0]} did not answer: {error}", hint="shoal doctor") from error
        said = done.stderr.lower()
        is_away = done.returncode != 0 and any(words in said for words in AWAY)
        if is_away or (self._ssh and done.returncode == SSH_FAILED):
            raise EngineUnreachable(f"{command[0]}: {done.stderr.strip()}", hint="shoal doctor")
        return done.returncode, done.stdout, done.stderr
