"""The door of commands: Slurm's own, here on a login node or over SSH on one. Nobody else here runs any."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import (
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    SlurmFacts,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_past,
    parse_topology,
)
from shoal.engines.slurm.render import Request, sbatch_arguments, sbatch_environment
from shoal.engines.slurm.states import Job, is_away, is_for_ever
from shoal.errors import EngineRefused, EngineUnreachable

TIMEOUT_S = 30.0
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
SSH_FAILED = 255
OTHERS = re.compile(r"(SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SCONTROL|SRUN)_")
"""Variables of people, or of a job that we are in, which would change what we ask for and what we see."""
OURS = frozenset({"SLURM_CONF"})
PAST = "now-30days"
"""How far back the accounting is asked: by itself it would look at today alone."""
NOT_RUN = (126, 127)
"""A shell's exit codes for a command that it could not find or start."""

log = structlog.get_logger()


class CommandDoor:
    """`shoal.engines.slurm.door.Door` by `sbatch`, `squeue`, `scontrol`, `scancel` and `sacct`."""

    def __init__(self, ssh: str = "", ssh_options: Sequence[str] = ()) -> None:
        self._ssh = ssh
        self._ssh_options = ssh_options

    def submit(self, request: Request) -> str:
        """The script goes over standard input."""
        # What an SSH server gives to a command is the login node's own, and little.
        env = own_environment(os.environ) if self._ssh else sbatch_environment(os.environ)
        code, told, said = self._run(["sbatch", *sbatch_arguments(request)], request.script, env)
        if code == 0:
            return told.strip().partition(";")[0]
        told = f"sbatch said: {said.strip()}"
        if code not in NOT_RUN and is_for_ever(said):
            raise EngineRefused(told, hint="shoal nodes", code=code)
        raise EngineUnreachable(told, hint="shoal doctor", code=code)

    def jobs(self) -> list[Job]:
        own = "--me" if self._ssh else f"--user={os.getuid()}"
        form = f"--format={SQUEUE_FORMAT}"
        return parse_jobs(self._ask(["squeue", "--noheader", "--states=all", form, own]))

    def past(self, names: Collection[str]) -> list[Job]:
        words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}"]
        words += [f"--name={','.join(sorted(names))}", f"--starttime={PAST}", f"--user={self._uid()}"]
        code, told, said = self._run(words)
        if code != 0:
            log.debug("slurm.no_accounting", code=code, said=said.strip())
        return parse_past(told) if code == 0 else []

    def nodes(self) -> list[RawNode]:
        return parse_nodes(self._ask(["scontrol", "show", "node", "-o"]))

    def facts(self) -> SlurmFacts:
        config = parse_config(self._ask(["scontrol", "show", "config"]))
        longest = parse_partitions(self._ask(["scontrol", "show", "partition", "-o"]))
        code, told, _ = self._run(["scontrol", "show", "topology", "-o"])
        racks = parse_topology(told) if code == 0 else {}
        return msgspec.structs.replace(config, longest=longest, racks=racks)

    def cancel(self, names: Collection[str]) -> None:
        for name in sorted(names):
            code, _, said = self._run(["scancel", "--quiet", f"--name={name}"])
            if code != 0:
                log.warning("slurm.scancel_failed", name=name, code=code, said=said.strip())

    def make_folder(self, path: str) -> None:
        if not self._ssh:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        code, _, said = self._run(["mkdir", "-p", "-m", "700", "--", path])
        if code != 0:
            raise EngineRefused(said.strip(), hint="connect again with a `--shared DIR` that you may write")

    def version(self) -> str:
        return self._ask(["sinfo", "--version"]).strip()

    def is_root(self) -> bool:
        return self._uid() == 0

    def _uid(self) -> int:
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
        if (done.returncode != 0 and is_away(done.stderr)) or (self._ssh and done.returncode == SSH_FAILED):
            raise EngineUnreachable(f"{command[0]}: {done.stderr.strip()}", hint="shoal doctor")
        return done.returncode, done.stdout, done.stderr


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands are run with."""
    return {name: value for name, value in env.items() if name in OURS or not OTHERS.match(name)}
