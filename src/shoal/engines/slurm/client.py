"""The only file of this engine that runs a command: Slurm's own, here on a login node or over SSH on one."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence

import structlog

from shoal.engines.slurm.parse import SQUEUE_FORMAT
from shoal.engines.slurm.render import sbatch_environment
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
FOR_EVER = (
    "node configuration is not available",
    "time limit is invalid",
    "memory specification can not be satisfied",
    "invalid generic resource",
    "cpu count per node",
    "more processors requested than permitted",
    "node count specification invalid",
    "pathname of a file",
    "script size",
    "unrecognized option",
    "invalid numeric value",
)
"""In the words of `sbatch`: about the request itself. All else may pass: a partition that is drained,
associations that are not loaded yet, a node that has just gone, limits on jobs of ours."""
OTHERS = re.compile(r"(SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SCONTROL|SRUN)_")
"""Variables of people, or of a job that we are in, which would change what we ask for and what we see."""
OURS = frozenset({"SLURM_CONF"})
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
        # What an SSH server gives to a command is the login node's own, and little.
        env = own_environment(os.environ) if self._ssh else sbatch_environment(os.environ)
        code, told, said = self._run(["sbatch", *arguments], script, env)
        if code == 0:
            return told.strip().partition(";")[0]
        words, told = said.lower(), f"sbatch said: {said.strip()}"
        if code not in NOT_RUN and any(known in words for known in FOR_EVER):
            raise EngineRefused(told, hint="shoal nodes", code=code)
        raise EngineUnreachable(told, hint="shoal doctor", code=code)

    def jobs(self) -> str:
        """Every job of this user that Slurm remembers."""
        own = "--me" if self._ssh else f"--user={os.getuid()}"
        return self._ask(["squeue", "--noheader", "--states=all", f"--format={SQUEUE_FORMAT}", own])

    def nodes(self) -> str:
        return self._ask(["scontrol", "show", "node", "-o"])

    def config(self) -> str:
        return self._ask(["scontrol", "show", "config"])

    def partitions(self) -> str:
        return self._ask(["scontrol", "show", "partition", "-o"])

    def topology(self) -> str:
        """Empty where Slurm has no tree of switches."""
        code, told, _ = self._run(["scontrol", "show", "topology", "-o"])
        return told if code == 0 else ""

    def cancel(self, names: Collection[str]) -> None:
        """By name: an id may be somebody else's by now. What is not there is not an error."""
        for name in sorted(names):
            code, _, said = self._run(["scancel", "--quiet", f"--name={name}"])
            if code != 0:
                log.warning("slurm.scancel_failed", name=name, code=code, said=said.strip())

    def make_folder(self, path: str) -> None:
        """With its parents, where Slurm's commands run. `EngineRefused`: it cannot be made there."""
        code, _, said = self._run(["mkdir", "-p", "-m", "700", "--", path])
        if code != 0:
            raise EngineRefused(said.strip(), hint="connect again with a `--shared DIR` that you may write")

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

    def _run(
        self, command: list[str], given: str = "", env: Mapping[str, str] | None = None
    ) -> tuple[int, str, str]:
        """`env`: of the process here, with its zone as it is. Else dates are in UTC: those of the zone of who
        asks are an hour off once a year, and all day over SSH.
        """
        zone = ["env", "TZ=UTC"] if env is None else []
        there = [*SSH, *self._ssh_options, self._ssh, shlex.join([*zone, *command])]
        words = there if self._ssh else command
        env = own_environment(os.environ) | {"TZ": "UTC"} if env is None else env
        try:
            done = subprocess.run(
                words, input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env
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


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands are run with."""
    return {name: value for name, value in env.items() if name in OURS or not OTHERS.match(name)}
