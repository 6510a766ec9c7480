"""The transport by Slurm's own commands, here on a login node or over SSH on one.

No other module of this engine runs commands.
"""

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

from shoal.engines.slurm import command_runner
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import (
    ASSOC_FORMAT,
    SACCT_FORMAT,
    SQUEUE_FORMAT,
    SlurmFacts,
    parse_accounting,
    parse_associations,
    parse_config,
    parse_jobs,
    parse_nodes,
    parse_partitions,
    parse_topology,
)
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.render import (
    EXPORTED_VARIABLES,
    SlurmJobRequest,
    sbatch_arguments,
    sbatch_environment,
)
from shoal.engines.slurm.shared_files import (
    CREATE_OWNER_FOLDERS,
    LIST_OUTPUTS,
    REFUSED,
    REMOVE_OUTPUTS,
    UnixAccount,
    parse_account,
    parse_outputs,
)
from shoal.engines.slurm.states import SlurmJob, is_permanent, is_unreachable
from shoal.errors import EngineRefused, EngineUnreachable

TIMEOUT_S = 30.0
SMALL_OUTPUT, LARGE_OUTPUT = 256 << 10, 256 << 20
"""Bytes that a command may write. The small limit is for short output and for commands that run as an
owner, who can make them write anything. The large one is for Slurm's lists, with 200 bytes for a job and
a thousand for a node."""
SSH = {
    "BatchMode": "yes",
    "ConnectTimeout": "10",
    "ServerAliveInterval": "5",
    # Overrides the user's own configuration: an agent would be open to the login node's root while we are
    # there.
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "RequestTTY": "no",
}
"""`ssh` takes the first of several values for one option, so the user's stand before these."""
SSH_FAILED = 255
SOCKET_BYTES = 40 + 17
"""The length of a connection's name (`%C`: a digest of both machines, user and port) and of the suffix that
`ssh` adds until the connection is there."""
PLAIN_PATH = re.compile(r"[\w/.+,@-]+", re.ASCII)
"""Other characters have a meaning in an argument of `ssh`."""
CONNECTION_IDLE_S = 60
"""How long an unused connection stays: twice as long as `squeue` is left in peace."""
SLURM_VARIABLES = re.compile(r"(SLURM|SBATCH|SQUEUE|SCANCEL|SINFO|SCONTROL|SRUN)_")
"""Variables of people, or of a job that we are in, which would change what we ask and see."""
KEPT_VARIABLES = frozenset({"SLURM_CONF"})
ACCOUNTING_SINCE = "now-30days"
"""How far back accounting is asked: by default it would look at today alone."""
NOT_RUN = (126, 127)
"""Exit codes of a shell for a command that it could not find or start."""
NO_CONFIG_SOURCE = "configuration source"
"""Part of the message of a command that found no `slurm.conf` and no server that has one."""
ELSEWHERE = "go to a login node, or name one: `shoal connect slurm --ssh USER@HOST`"
NO_CONFIG = f"set SLURM_CONF, or {ELSEWHERE}"
UNKNOWN_NAME = 2
"""The exit code of `getent` for an unknown name."""

log = structlog.get_logger()


class CommandTransport:
    """A `SlurmTransport` by `sbatch`, `squeue`, `scontrol`, `scancel` and `sacct`."""

    def __init__(
        self,
        ssh: str = "",
        ssh_options: Sequence[str] = (),
        *,
        as_owners: bool = False,
        sockets: Path | None = None,
    ) -> None:
        """Create the transport.

        `as_owners`: jobs belong to many users, and the commands run as root. `sockets`: a private folder in
        which `ssh` keeps its connection for the next command; None: each command is a login of its own.
        """
        self._ssh = ssh
        self._ssh_options = ssh_options
        self._sockets = sockets if ssh and sockets is not None and _can_listen_in(sockets) else None
        self._as_owners = as_owners
        self._seen_accounts: set[str] = set()
        """Names that were an account's."""

    def submit(self, request: SlurmJobRequest, account: UnixAccount | None = None) -> str:
        """Submit a job; the script goes over standard input. `account`: the job's owner; None: ours."""
        # A command over SSH gets the login node's environment, which is small. Of root's, an owner gets as
        # much as here.
        env = command_environment(os.environ) if self._ssh else sbatch_environment(os.environ)
        command = [*as_account(account, is_far=bool(self._ssh)), "sbatch", *sbatch_arguments(request)]
        code, output, errors = self._run(command, request.script, env)
        if code == 0:
            return output.strip().partition(";")[0]
        message = f"sbatch said: {errors.strip()}"
        if code not in NOT_RUN and is_permanent(errors):
            raise EngineRefused(message, hint="shoal nodes", code=code)
        raise EngineUnreachable(message, hint=self._hint_after(errors), code=code)

    def jobs(self) -> list[SlurmJob]:
        """Return our jobs; those of every user if jobs run as their owners."""
        whose = "" if self._as_owners else "--me" if self._ssh else f"--user={os.getuid()}"
        # Names may hold newlines: lines that look like another user's job. What every line begins with is
        # new each time, and is on no command line that others could read.
        mark = os.urandom(16).hex()
        # Without `--all`, squeue omits our own jobs in hidden partitions and in those for other groups.
        command = f"squeue --noheader --all --states=all {whose}"
        script = f"SQUEUE_FORMAT='{mark}{SQUEUE_FORMAT}' exec {command}\n"
        output = self._ask(["sh"], script, name="squeue")
        return parse_jobs("\n".join(" ".join(job.splitlines()) for job in output.split(mark)[1:]))

    def accounting_jobs(self, names: Collection[str]) -> list[SlurmJob]:
        whose = ["--allusers"] if self._as_owners else [f"--user={self._uid()}"]
        command = ["sacct", "--noheader", "--parsable2", "--allocations", f"--format={SACCT_FORMAT}"]
        command += [f"--name={','.join(sorted(names))}", f"--starttime={ACCOUNTING_SINCE}", *whose]
        code, output, errors = self._run(command, max_bytes=LARGE_OUTPUT)
        if code != 0:
            log.debug("slurm.no_accounting", code=code, said=errors.strip())
        return parse_accounting(output) if code == 0 else []

    def nodes(self) -> list[RawNode]:
        return parse_nodes(self._ask(["scontrol", "--all", "show", "node", "-o"]))

    def partitions(self) -> list[Partition]:
        return parse_partitions(self._ask(["scontrol", "--all", "show", "partition", "-o"]))

    def associations(self) -> list[Association]:
        if self._as_owners:
            return []
        command = ["sacctmgr", "--noheader", "--parsable2", "show", "user", "withassoc"]
        name = self.account_name()
        try:
            query = [*command, f"format={ASSOC_FORMAT}", "where", f"name={name}"]
            code, output, _ = self._run(query, max_bytes=LARGE_OUTPUT)
        except EngineUnreachable:  # slurmdbd is away, or `sacctmgr` is not installed
            return []
        return parse_associations(output) if code == 0 else []

    def facts(self) -> SlurmFacts:
        config = parse_config(self._ask(["scontrol", "show", "config"]))
        code, output, _ = self._run(["scontrol", "show", "topology", "-o"], max_bytes=LARGE_OUTPUT)
        switch_labels = parse_topology(output) if code == 0 else {}
        # It fails if one of the groups has no name: then they are unknown.
        code, output, _ = self._run(["id", "-Gn"], max_bytes=LARGE_OUTPUT)
        groups = output.split() if code == 0 and not self._as_owners else []
        is_root = not self._as_owners and self.is_root()
        return msgspec.structs.replace(
            config, switch_labels=switch_labels, is_root=is_root, groups=frozenset(groups)
        )

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """Cancel by name. `user`: only that Unix account's jobs; others may have used the same name."""
        whose = [f"--user={user}"] if user else []
        for name in sorted(names):
            code, _, errors = self._run(["scancel", "--quiet", f"--name={name}", *whose])
            if code != 0:
                log.warning("slurm.scancel_failed", name=name, code=code, said=errors.strip())

    def make_folder(self, path: str) -> None:
        if not self._ssh:
            Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        code, _, errors = self._run(["mkdir", "-p", "-m", "700", "--", path])
        if code != 0 and "permission denied" in errors.lower():
            raise EngineRefused(errors.strip(), hint="connect again with a `--shared DIR` that you may write")
        if code != 0:
            raise EngineUnreachable(
                f"no folder {path} yet: {errors.strip()}", hint=self._typed("mkdir", path)
            )

    def has_folder(self, path: str) -> bool:
        if not self._ssh:
            return os.path.isdir(path)  # noqa: PTH112 - what may not be looked at is not there, either
        return self._run(["test", "-d", path])[0] == 0

    def outputs(self, folder: str) -> dict[str, int]:
        depth = "2" if self._as_owners else "1"
        return parse_outputs(self._ask(["sh", "-c", LIST_OUTPUTS, "sh", folder, depth], name="find"))

    def drop_outputs(self, folder: str, paths: Collection[str]) -> None:
        if paths:
            self._ask(["sh", "-c", REMOVE_OUTPUTS, "sh", folder], "\0".join(paths), name="rm")

    def version(self) -> str:
        return self._ask(["sinfo", "--version"]).strip()

    def is_root(self) -> bool:
        return self._uid() == 0

    def account_name(self) -> str:
        return self._ask(["id", "-un"]).strip()

    def _uid(self) -> int:
        return int(self._ask(["id", "-u"])) if self._ssh else os.getuid()

    def account(self, name: str) -> UnixAccount | None:
        """Return the Unix account of exactly that name; None: there is none."""
        code, output, errors = self._run(["getent", "passwd", name])
        if code == UNKNOWN_NAME and name in self._seen_accounts:
            # This also happens while the directory service is away. A name that was really removed is
            # refused after `shoal up`.
            errors = f"it knows no `{name}` now, and did before"
        elif code == UNKNOWN_NAME:
            return None
        if code != 0:
            typed = self._typed("getent", "passwd", name)
            raise EngineUnreachable(f"getent failed: {errors.strip()}", hint=typed, code=code)
        account = parse_account(name, output)
        self._seen_accounts |= {name} if account is not None else set()
        return account

    def create_owner_folders(self, shared: str, folders: Sequence[str], account: UnixAccount) -> None:
        """Create these folders below `shared` for that account alone. May be repeated.

        `EngineRefused`: another user has them, or could replace them.
        """
        ids = [str(account.uid), str(account.gid)]
        code, _, errors = self._run(["sh", "-c", CREATE_OWNER_FOLDERS, "sh", shared, *ids, *folders])
        if code == REFUSED:
            raise EngineRefused(
                f"no place for {account.name}: {errors.strip()}", hint="shoal connect slurm --help"
            )
        if code != 0:
            typed = self._typed("ls", "-la", shared)
            raise EngineUnreachable(f"no place for {account.name} yet: {errors.strip()}", hint=typed)

    def _ask(self, command: list[str], stdin: str = "", name: str = "") -> str:
        code, output, errors = self._run(command, stdin, max_bytes=LARGE_OUTPUT)
        if code != 0:
            raise EngineUnreachable(
                f"{name or command[0]} failed: {errors.strip() or output.strip()}",
                hint=self._hint_after(errors),
            )
        return output

    def _run(
        self,
        command: list[str],
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        max_bytes: int = SMALL_OUTPUT,
    ) -> command_runner.CommandResult:
        """Run a command, here or over SSH.

        `env`: the environment of the local process, unchanged. Without it, dates are in UTC and messages in
        English: local dates are an hour off once a year, and all day over SSH. `max_bytes`: of standard
        output; a command that writes more counts as one that did not reply.
        """
        plain = {"TZ": "UTC", "LC_ALL": "C"} if env is None else {}
        command_line = self._ssh_command(plain, command) if self._ssh else command
        env = command_environment(os.environ) | plain if env is None else env
        try:
            result = command_runner.run(
                command_line,
                stdin,
                env,
                timeout_s=TIMEOUT_S,
                max_stdout_bytes=max_bytes,
                max_stderr_bytes=SMALL_OUTPUT,
                in_new_session=self._as_owners,  # a user who can trace it must not reach our terminal
            )
        except FileNotFoundError:
            raise EngineUnreachable(
                f"there is no `{command_line[0]}` on this machine", hint=ELSEWHERE
            ) from None
        except subprocess.TimeoutExpired as error:
            raise self._timeout_error(command[0], error) from None
        except command_runner.OutputTooLargeError as error:
            raise EngineUnreachable(f"{command[0]} was ended: {error}", hint=self._hint_after("")) from None
        except OSError as error:
            message = f"{command_line[0]} cannot be run: {error.strerror or error}"
            raise EngineUnreachable(message, hint=f"`{command_line[0]} --version`") from error
        if self._ssh and result.code == SSH_FAILED:
            raise EngineUnreachable(f"ssh to {self._ssh}: {result.stderr.strip()}", hint=self._typed("sinfo"))
        if result.code != 0 and is_unreachable(result.stderr):
            raise EngineUnreachable(
                f"{command[0]}: {result.stderr.strip()}", hint=self._hint_after(result.stderr)
            )
        return result

    def _timeout_error(self, name: str, error: subprocess.TimeoutExpired) -> EngineUnreachable:
        lines = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        last_line = f": {lines[-1].strip()}" if lines else ""
        config = "" if self._ssh else os.environ.get("SLURM_CONF", "")
        where = f" by SLURM_CONF={config}" if config else ""
        message = f"{name} did not answer within {error.timeout:g} s{where}{last_line}"
        if config and not os.access(config, os.R_OK):
            return EngineUnreachable(message, hint=f"`ls -l {shlex.quote(config)}`, or {NO_CONFIG}")
        return EngineUnreachable(message, hint=self._hint_after(last_line))

    def _hint_after(self, message: str) -> str:
        """Return what to type after this message of Slurm's."""
        if not self._ssh and NO_CONFIG_SOURCE in message.lower():
            return NO_CONFIG
        return f"{self._typed('scontrol', 'ping')} says whether slurmctld answers"

    def _typed(self, *command: str) -> str:
        """Return that command as a person types it where it is to run."""
        there = ["ssh", *self._ssh_options, self._ssh] if self._ssh else []
        return f"`{shlex.join([*there, *command])}`"

    def _ssh_command(self, plain: Mapping[str, str], command: list[str]) -> list[str]:
        options = dict(SSH)
        if self._sockets is not None:
            options |= {"ControlMaster": "auto", "ControlPath": f"{self._sockets}/%C"}
            options["ControlPersist"] = str(CONNECTION_IDLE_S)
        ours = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        there = [*(["env"] if plain else []), *(f"{name}={value}" for name, value in plain.items()), *command]
        return ["ssh", *self._ssh_options, *ours, "--", self._ssh, shlex.join(there)]


def _can_listen_in(folder: Path) -> bool:
    """Return whether connections can be kept there, out of other users' reach.

    The path of a socket has at most 107 bytes, and some file systems have no sockets.
    """
    probe = folder / os.urandom(SOCKET_BYTES).hex()[:SOCKET_BYTES]
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(probe))
        probe.unlink()
    except OSError:
        return False
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    return is_ours and PLAIN_PATH.fullmatch(str(folder)) is not None


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of Slurm's commands."""
    return {
        name: value
        for name, value in env.items()
        if name in KEPT_VARIABLES or not SLURM_VARIABLES.match(name)
    }


def as_account(account: UnixAccount | None, *, is_far: bool = False) -> list[str]:
    """Return the words before a command that runs as that user; empty: as ourselves.

    That user can read all of its environment. `is_far`: it runs with a session's environment on another
    machine, most of which is left out.
    """
    if account is None:
        return []
    home = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
    passed = " ".join(
        f'${{{name}+"{name}=${name}"}}' for name in (*EXPORTED_VARIABLES, *KEPT_VARIABLES) if name not in home
    )
    env = ["sh", "-c", f'exec env -i --chdir=/ {passed} "$@"', "sh"] if is_far else ["env", "--chdir=/"]
    return [
        *env,
        *(f"{name}={value}" for name, value in home.items()),
        "setpriv",
        f"--reuid={account.uid}",
        f"--regid={account.gid}",
        "--init-groups",
    ]
