"""The door of commands: Slurm's own, here on a login node or over SSH on one. Nobody else here runs any."""

from __future__ import annotations

import os
import re
import shlex
import socket
import stat
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from shoal.engines import commands
from shoal.engines.slurm.accounts import GIVE, REFUSED, Account, parse_account
from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.outputs import DROP, LIST, parse_outputs
from shoal.engines.slurm.parse import (
    ASSOC_FORMAT,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    SlurmFacts,
    parse_associations,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_past,
    parse_topology,
)
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import EXPORTED, Request, sbatch_arguments, sbatch_environment
from shoal.engines.slurm.states import Job, is_away, is_for_ever
from shoal.errors import EngineRefused, EngineUnreachable

TIMEOUT_S = 30.0
LITTLE, MUCH = 256 << 10, 256 << 20
"""Bytes that a command may say: one that has little to tell, or runs as an owner, who can have it say
anything; and a process of ours that tells a list of Slurm's, of 200 bytes for a job, and a thousand for a
node."""
SSH = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    # Whatever the user's own configuration offers: an agent is root's of the login node while we are there.
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "RequestTTY": "no",
}
"""Of several words for one option `ssh` takes the first: those of the user stand before."""
SSH_FAILED = 255
SOCKET_BYTES = 40 + 17
"""The name of a connection (`%C`: a digest of both machines, user and port), with what `ssh` puts behind it
until the connection is there."""
PLAIN_PATH = re.compile(r"[\w/.+,@-]+", re.ASCII)
"""All else means something in a word for `ssh`."""
STAYS_S = 60
"""How long a connection stays that nobody uses: twice as long as `squeue` is left in peace."""
OTHERS = re.compile(r"(SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SCONTROL|SRUN)_")
"""Variables of people, or of a job that we are in, which would change what we ask for and what we see."""
OURS = frozenset({"SLURM_CONF"})
PAST = "now-30days"
"""How far back the accounting is asked: by itself it would look at today alone."""
NOT_RUN = (126, 127)
"""A shell's exit codes for a command that it could not find or start."""
SOURCELESS = "configuration source"
"""Of the words of a command that found no `slurm.conf`, and nobody who would give it one."""
ELSEWHERE = "go to a login node, or name one: `shoal connect slurm --ssh USER@HOST`"
NO_CONFIG = f"set SLURM_CONF, or {ELSEWHERE}"
UNKNOWN_NAME = 2
"""An exit code of `getent`."""

log = structlog.get_logger()


class CommandDoor:
    """`shoal.engines.slurm.door.Door` by `sbatch`, `squeue`, `scontrol`, `scancel` and `sacct`."""

    def __init__(
        self,
        ssh: str = "",
        ssh_options: Sequence[str] = (),
        *,
        as_owners: bool = False,
        sockets: Path | None = None,
    ) -> None:
        """`as_owners`: jobs are of many users, and whoever runs the commands is root. `sockets`: a folder of
        ours alone, where `ssh` keeps its connection for the next question; None: each is a login of its own.
        """
        self._ssh = ssh
        self._ssh_options = ssh_options
        self._sockets = sockets if ssh and sockets is not None and _can_listen_in(sockets) else None
        self._as_owners = as_owners
        self._known: set[str] = set()
        """Names that were an account's."""

    def submit(self, request: Request, account: Account | None = None) -> str:
        """The script goes over standard input. `account`: whose the job is; None: ours."""
        # What an SSH server gives to a command is the login node's own, and little; of root's an owner gets
        # as much as here.
        env = own_environment(os.environ) if self._ssh else sbatch_environment(os.environ)
        command = [*becoming(account, is_far=bool(self._ssh)), "sbatch", *sbatch_arguments(request)]
        code, told, said = self._run(command, request.script, env)
        if code == 0:
            return told.strip().partition(";")[0]
        told = f"sbatch said: {said.strip()}"
        if code not in NOT_RUN and is_for_ever(said):
            raise EngineRefused(told, hint="shoal nodes", code=code)
        raise EngineUnreachable(told, hint=self._next(said), code=code)

    def jobs(self) -> list[Job]:
        """Of ours; as owners, everybody's."""
        whose = "" if self._as_owners else "--me" if self._ssh else f"--user={os.getuid()}"
        # Names may hold newlines: lines that look like another user's job. What every line begins with is
        # new each time, and is on no command line that others could read.
        mark = os.urandom(16).hex()
        # Without `--all` one's own jobs in hidden partitions are left out, and in those for other groups.
        words = f"squeue --noheader --all --states=all {whose}"
        asking = f"SQUEUE_FORMAT='{mark}{SQUEUE_FORMAT}' exec {words}\n"
        told = self._ask(["sh"], asking, name="squeue")
        return parse_jobs("\n".join(" ".join(job.splitlines()) for job in told.split(mark)[1:]))

    def past(self, names: Collection[str]) -> list[Job]:
        whose = ["--allusers"] if self._as_owners else [f"--user={self._uid()}"]
        words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}"]
        words += [f"--name={','.join(sorted(names))}", f"--starttime={PAST}", *whose]
        code, told, said = self._run(words, most=MUCH)
        if code != 0:
            log.debug("slurm.no_accounting", code=code, said=said.strip())
        return parse_past(told) if code == 0 else []

    def nodes(self) -> list[RawNode]:
        return parse_nodes(self._ask(["scontrol", "--all", "show", "node", "-o"]))

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask(["scontrol", "--all", "show", "partition", "-o"]))

    def associations(self) -> list[Association]:
        if self._as_owners:
            return []
        words = ["sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc"]
        name = self.asker()
        try:
            asked = [*words, f"format={ASSOC_FORMAT}", "where", f"name={name}"]
            code, told, _ = self._run(asked, most=MUCH)
        except EngineUnreachable:  # slurmdbd is away, or nobody has installed `sacctmgr`
            return []
        return parse_associations(told) if code == 0 else []

    def facts(self) -> SlurmFacts:
        config = parse_config(self._ask(["scontrol", "show", "config"]))
        code, told, _ = self._run(["scontrol", "show", "topology", "-o"], most=MUCH)
        places = parse_topology(told) if code == 0 else {}
        # It fails where one of them has no name: then they are not known.
        code, told, _ = self._run(["id", "-Gn"], most=MUCH)
        groups = told.split() if code == 0 and not self._as_owners else []
        is_root = not self._as_owners and self.is_root()
        return msgspec.structs.replace(config, places=places, is_root=is_root, groups=frozenset(groups))

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """`user`: of that Unix account alone; others may have given theirs the same name."""
        whose = [f"--user={user}"] if user else []
        for name in sorted(names):
            code, _, said = self._run(["scancel", "--quiet", f"--name={name}", *whose])
            if code != 0:
                log.warning("slurm.scancel_failed", name=name, code=code, said=said.strip())

    def make_folder(self, path: str) -> None:
        if not self._ssh:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        code, _, said = self._run(["mkdir", "-p", "-m", "700", "--", path])
        if code != 0 and "permission denied" in said.lower():
            raise EngineRefused(said.strip(), hint="connect again with a `--shared DIR` that you may write")
        if code != 0:
            raise EngineUnreachable(f"no folder {path} yet: {said.strip()}", hint=self._typed("mkdir", path))

    def has_folder(self, path: str) -> bool:
        if not self._ssh:
            return os.path.isdir(path)  # noqa: PTH112 - what may not be looked at is not there, either
        return self._run(["test", "-d", path])[0] == 0

    def outputs(self, folder: str) -> dict[str, int]:
        depth = "2" if self._as_owners else "1"
        return parse_outputs(self._ask(["sh", "-c", LIST, "sh", folder, depth], name="find"))

    def drop_outputs(self, folder: str, paths: Collection[str]) -> None:
        if paths:
            self._ask(["sh", "-c", DROP, "sh", folder], "\0".join(paths), name="rm")

    def version(self) -> str:
        return self._ask(["sinfo", "--version"]).strip()

    def is_root(self) -> bool:
        return self._uid() == 0

    def asker(self) -> str:
        return self._ask(["id", "-un"]).strip()

    def _uid(self) -> int:
        return int(self._ask(["id", "-u"])) if self._ssh else os.getuid()

    def account(self, name: str) -> Account | None:
        """The Unix account of that very name; None: there is none."""
        code, told, said = self._run(["getent", "passwd", name])
        if code == UNKNOWN_NAME and name in self._known:
            # So it is where their directory is away. Who was really removed is refused after a `shoal up`.
            said = f"it knows no `{name}` now, and did before"
        elif code == UNKNOWN_NAME:
            return None
        if code != 0:
            typed = self._typed("getent", "passwd", name)
            raise EngineUnreachable(f"getent failed: {said.strip()}", hint=typed, code=code)
        found = parse_account(name, told)
        self._known |= {name} if found is not None else set()
        return found

    def give(self, shared: str, folders: Sequence[str], account: Account) -> None:
        """Make these folders below `shared` for that account alone. May be repeated.

        `EngineRefused`: somebody else has them, or could put theirs in their place.
        """
        who = [str(account.uid), str(account.gid)]
        code, _, said = self._run(["sh", "-c", GIVE, "sh", shared, *who, *folders])
        if code == REFUSED:
            raise EngineRefused(
                f"no place for {account.name}: {said.strip()}", hint="shoal connect slurm --help"
            )
        if code != 0:
            typed = self._typed("ls", "-la", shared)
            raise EngineUnreachable(f"no place for {account.name} yet: {said.strip()}", hint=typed)

    def _ask(self, command: list[str], given: str = "", name: str = "") -> str:
        code, told, said = self._run(command, given, most=MUCH)
        if code != 0:
            raise EngineUnreachable(
                f"{name or command[0]} failed: {said.strip() or told.strip()}", hint=self._next(said)
            )
        return told

    def _run(
        self,
        command: list[str],
        given: str = "",
        env: Mapping[str, str] | None = None,
        most: int = LITTLE,
    ) -> commands.Done:
        """`env`: of the process here, with its zone and language as they are. Else dates are in UTC: those of
        the zone of who asks are an hour off once a year, and all day over SSH; and errors are in English.
        `most`: bytes that it may tell; one that tells more counts as one that did not answer.
        """
        plain = {"TZ": "UTC", "LC_ALL": "C"} if env is None else {}
        words = self._words_over_ssh(plain, command) if self._ssh else command
        env = own_environment(os.environ) | plain if env is None else env
        try:
            done = commands.run(
                words,
                given,
                env,
                timeout_s=TIMEOUT_S,
                most_told=most,
                most_said=LITTLE,
                in_new_session=self._as_owners,  # who can trace it must not reach our terminal
            )
        except FileNotFoundError:
            raise EngineUnreachable(f"there is no `{words[0]}` on this machine", hint=ELSEWHERE) from None
        except subprocess.TimeoutExpired as error:
            raise self._late(command[0], error) from None
        except commands.TooMuchError as error:
            raise EngineUnreachable(f"{command[0]} was ended: {error}", hint=self._next("")) from None
        except OSError as error:
            told = f"{words[0]} cannot be run: {error.strerror or error}"
            raise EngineUnreachable(told, hint=f"`{words[0]} --version`") from error
        if self._ssh and done.code == SSH_FAILED:
            raise EngineUnreachable(f"ssh to {self._ssh}: {done.said.strip()}", hint=self._typed("sinfo"))
        if done.code != 0 and is_away(done.said):
            raise EngineUnreachable(f"{command[0]}: {done.said.strip()}", hint=self._next(done.said))
        return done

    def _late(self, name: str, error: subprocess.TimeoutExpired) -> EngineUnreachable:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        said = f": {lines[-1].strip()}" if lines else ""
        config = "" if self._ssh else os.environ.get("SLURM_CONF", "")
        where = f" by SLURM_CONF={config}" if config else ""
        told = f"{name} did not answer within {error.timeout:g} s{where}{said}"
        if config and not os.access(config, os.R_OK):
            return EngineUnreachable(told, hint=f"`ls -l {shlex.quote(config)}`, or {NO_CONFIG}")
        return EngineUnreachable(told, hint=self._next(said))

    def _next(self, said: str) -> str:
        """What to type after these words of Slurm's."""
        if not self._ssh and SOURCELESS in said.lower():
            return NO_CONFIG
        return f"{self._typed('scontrol', 'ping')} says whether slurmctld answers"

    def _typed(self, *command: str) -> str:
        """That command, as a person types it where it is to run."""
        there = ["ssh", *self._ssh_options, self._ssh] if self._ssh else []
        return f"`{shlex.join([*there, *command])}`"

    def _words_over_ssh(self, plain: Mapping[str, str], command: list[str]) -> list[str]:
        options = dict(SSH)
        if self._sockets is not None:
            options |= {"ControlMaster": "auto", "ControlPath": f"{self._sockets}/%C"}
            options["ControlPersist"] = str(STAYS_S)
        ours = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        there = [*(["env"] if plain else []), *(f"{name}={value}" for name, value in plain.items()), *command]
        return ["ssh", *self._ssh_options, *ours, "--", self._ssh, shlex.join(there)]


def _can_listen_in(folder: Path) -> bool:
    """Whether connections can be kept there, out of others' reach. The path of a socket has 107 bytes, and
    some file systems have none.
    """
    probe = folder / os.urandom(SOCKET_BYTES).hex()[:SOCKET_BYTES]
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(probe))
        probe.unlink()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return is_ours and PLAIN_PATH.fullmatch(str(folder)) is not None


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands are run with."""
    return {name: value for name, value in env.items() if name in OURS or not OTHERS.match(name)}


def becoming(account: Account | None, *, is_far: bool = False) -> list[str]:
    """Words before a command that is to run as that user; none: as ourselves. That user can read all that its
    environment holds. `is_far`: it is not ours but a session's on another machine, most of which is left out.
    """
    if account is None:
        return []
    home = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    kept = " ".join(f'${{{name}+"{name}=${name}"}}' for name in (*EXPORTED, *OURS) if name not in home)
    env = ["sh", "-c", f'exec env -i --chdir=/ {kept} "$@"', "sh"] if is_far else ["env", "--chdir=/"]
    return [
        *env,
        *(f"{name}={value}" for name, value in home.items()),
        "setpriv",
        f"--reuid={account.uid}",
        f"--regid={account.gid}",
        "--init-groups",
    ]
