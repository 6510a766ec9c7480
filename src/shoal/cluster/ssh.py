"""Machines over SSH: one connection each; a script and its standard input go in, a result comes out.

Host keys are always checked against `known_hosts`. An unknown machine is refused unless new keys were
explicitly accepted; a changed key is always refused. Only public keys log in: no password is ever asked for,
stored or put on a command line.
"""

from __future__ import annotations

import asyncio
import getpass
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncssh

from shoal.cluster.inventory import InventoryHost
from shoal.cluster.machine import ScriptResult
from shoal.errors import EngineRefused, EngineUnreachable

CONNECT_S = 15.0
KEEPALIVE_S = 15.0
MAX_OUTPUT = 1 << 20
LOCK = "/run/shoal-cluster.lock"


@dataclass(frozen=True)
class Access:
    """How machines are reached, beyond what the inventory says of each."""

    identity: str | None = None
    known_hosts: Path | None = None
    accepts_new_keys: bool = False

    @property
    def known_hosts_file(self) -> Path:
        return self.known_hosts or Path.home() / ".ssh" / "known_hosts"


class _Client(asyncssh.SSHClient):
    """Decides about host keys that `known_hosts` does not have."""

    def __init__(self, access: Access, host_keys: asyncssh.SSHKnownHosts) -> None:
        self.access = access
        self.host_keys = host_keys
        self.seen = ""
        self.is_changed = False

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.seen = key.get_fingerprint()
        self.is_changed = bool(self.host_keys.match(host, addr, port)[0])
        if self.is_changed or not self.access.accepts_new_keys:
            return False
        place = host if port == 22 else f"[{host}]:{port}"
        key_fields = key.export_public_key("openssh").decode("ascii").split()
        file = self.access.known_hosts_file
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        last = file.read_bytes()[-1:] if file.exists() else b""
        with file.open("a", encoding="ascii") as key_file:
            key_file.write("\n" if last not in {b"", b"\n"} else "")  # the last line may lack its newline
            key_file.write(f"{place} {key_fields[0]} {key_fields[1]}\n")
        return True


class SshMachine:
    """A machine behind an open connection."""

    def __init__(
        self, host: InventoryHost, connection: asyncssh.SSHClientConnection, typed: str, *, is_root: bool
    ) -> None:
        """`typed`: the command by which a person logs in as we did."""
        self._host = host
        self.typed = typed
        self.as_root = typed if is_root else f"{typed} sudo"
        self._connection = connection
        self._prefix = "" if is_root else 'sudo -n env SSH_CONNECTION="$SSH_CONNECTION" '

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> ScriptResult:
        """Run a script and return its result. After `EngineUnreachable` it may or may not have run."""
        # Without content of its own, standard input brings the script: of any length, read whole first.
        command = f"{self._prefix}sh -c {shlex.quote(script)}" if stdin else f"{self._prefix}sh -s"
        stdin = stdin or f"{{\n{script}\n}} </dev/null\n".encode()
        try:
            # Opening a channel waits, too, and asyncssh's own limit starts after it.
            async with asyncio.timeout(timeout_s):
                done = await self._connection.run(command, input=stdin, encoding=None)
        except TimeoutError:
            raise EngineUnreachable(
                f"{self._host.label} did not finish within {timeout_s:g} s",
                hint=f"{self.typed} ps aux",
            ) from None
        except (OSError, asyncssh.Error) as lost:
            raise EngineUnreachable(
                f"{self._host.label}: the connection was lost ({lost})", hint=f"{self.typed} true"
            ) from None
        code = 255 if done.returncode is None else done.returncode
        return ScriptResult(code, _text(done.stdout), _text(done.stderr))

    async def hold(self) -> str:
        """Lock the machine by a process there that reads from us: it ends when this process is gone."""
        user = shlex.quote(f"{getpass.getuser()}@{socket.gethostname()}")
        script = f"""\
umask 077
exec 9>>{LOCK}
flock -n 9 || {{ echo "busy $(cat {LOCK})"; exit 1; }}
echo {user} "(process $$ there)" >{LOCK}
echo held
exec cat >/dev/null"""
        command = f"{self._prefix}sh -c {shlex.quote(script)}"
        try:
            async with asyncio.timeout(CONNECT_S):
                process = await self._connection.create_process(command)
                line = str(await process.stdout.readline()).strip()
        except (OSError, asyncssh.Error, TimeoutError) as lost:
            raise EngineUnreachable(
                f"{self._host.label}: the connection was lost ({lost})", hint=f"{self.typed} true"
            ) from None
        # If even this could not be run, the next command reports why.
        return line.removeprefix("busy").strip() or "somebody" if line.startswith("busy") else ""

    async def close(self) -> None:
        self._connection.close()
        await self._connection.wait_closed()


def _text(output: Any) -> str:
    return bytes(output or b"")[-MAX_OUTPUT:].decode("utf-8", "replace")


class Ssh:
    """Opens connections; jump hosts are connected to once and shared."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._jumps: dict[str, asyncio.Task[asyncssh.SSHClientConnection]] = {}

    async def connect(self, host: InventoryHost) -> SshMachine:
        """Connect to a machine. Both errors say what to type.

        Raise `EngineUnreachable` if it did not answer, `EngineRefused` if one side refused the other.
        """
        typed = ssh_command(host.address, host.user, host.port, host.jump, self._access.identity)
        tunnel = await self._jump(host.jump) if host.jump else None
        connection = await self._open(host.address, host.user, host.port, tunnel, host.jump)
        try:
            result = await connection.run("id -u", timeout=CONNECT_S)
        except (OSError, asyncssh.Error) as lost:
            connection.close()
            raise EngineUnreachable(
                f"{host.label} accepted the login and ran nothing: {lost}", hint=f"{typed} id"
            ) from None
        return SshMachine(host, connection, typed, is_root=str(result.stdout).strip() == "0")

    async def _jump(self, where: str) -> asyncssh.SSHClientConnection:
        if where not in self._jumps:
            user, _, rest = where.rpartition("@")
            address, _, port = rest.partition(":")
            opening = self._open(address, user or None, int(port) if port.isdigit() else None, None)
            self._jumps[where] = asyncio.ensure_future(opening)
        return await asyncio.shield(self._jumps[where])

    async def _open(
        self,
        address: str,
        user: str | None,
        port: int | None,
        tunnel: asyncssh.SSHClientConnection | None,
        jump: str | None = None,
    ) -> asyncssh.SSHClientConnection:
        file = self._access.known_hosts_file
        host_keys = _load_host_keys(file)
        typed = ssh_command(address, user, port, jump, self._access.identity)
        client = _Client(self._access, host_keys)
        options: dict[str, Any] = {
            "known_hosts": host_keys,
            "preferred_auth": "publickey",
            "connect_timeout": CONNECT_S,
            "keepalive_interval": KEEPALIVE_S,
            "client_factory": lambda: client,
        }
        if user:
            options["username"] = user
        if port:
            options["port"] = port
        if self._access.identity:
            options["client_keys"] = [self._access.identity]
        try:
            return await asyncssh.connect(address, tunnel=tunnel, **options)
        except asyncssh.HostKeyNotVerifiable:
            raise _unknown_key(address, client, file) from None
        except asyncssh.PermissionDenied:
            raise _no_key(address, user, port, jump, self._access.identity) from None
        except asyncssh.KeyImportError as wrong:
            raise EngineRefused(
                f"the key {self._access.identity or 'in ~/.ssh'} cannot be read: {wrong}", hint="ssh-add"
            ) from None
        except (OSError, asyncssh.Error, TimeoutError) as wrong:
            problem = str(wrong) or f"no answer within {CONNECT_S:g} s"
            raise EngineUnreachable(f"{address} cannot be reached: {problem}", hint=f"{typed} true") from None

    async def close(self) -> None:
        for task in self._jumps.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()


def ssh_command(
    address: str, user: str | None, port: int | None, jump: str | None, identity: str | None
) -> str:
    """Return the command by which a person logs in there as we do."""
    ways = {"-i": identity, "-p": port, "-J": jump}
    options = [option for flag, way in ways.items() if way for option in (flag, str(way))]
    return shlex.join(["ssh", *options, f"{user}@{address}" if user else address])


def _no_key(
    address: str, user: str | None, port: int | None, jump: str | None, identity: str | None
) -> EngineRefused:
    tried = f"does not take the key {identity}" if identity else "takes none of our keys"
    whose = f"user `{user}`" if user else "the user that ~/.ssh/config or your own login names"
    copier = shlex.join(["ssh-copy-id", *(["-o", f"ProxyJump={jump}"] if jump else [])])  # it has no `-J`
    copied = ssh_command(address, user, port, None, identity).replace("ssh", copier, 1)
    other = "another key" if identity else "a key"
    return EngineRefused(
        f"{address} {tried} for {whose}", hint=f"{copied}, or name {other} with `--identity`"
    )


def _load_host_keys(file: Path) -> asyncssh.SSHKnownHosts:
    """Load the host keys of a file, if it exists. Raise `EngineRefused` with the line that cannot be read."""
    place, host_keys = str(file), asyncssh.import_known_hosts("")
    hint = f"ls -l {shlex.quote(place)}"
    try:
        for number, line in enumerate(file.read_text("utf-8", "replace").split("\n"), start=1):
            place = f"line {number} of {file}"
            hint = f"sed -n {number}p {shlex.quote(str(file))} shows it"
            host_keys.load(line)
    except FileNotFoundError:
        pass
    except (ValueError, OSError) as wrong:
        raise EngineRefused(
            f"{place} cannot be read: {wrong}",
            hint=f"{hint}; fix it, or name another file with `--known-hosts`",
        ) from None
    return host_keys


def _unknown_key(address: str, client: _Client, file: Path) -> EngineRefused:
    if client.is_changed:
        return EngineRefused(
            f"{address} shows another host key ({client.seen}) than {file} knows: it was reinstalled,"
            " or another machine answers in its place",
            hint=f"if it was reinstalled: ssh-keygen -R {address}",
        )
    return EngineRefused(
        f"{address} shows the host key {client.seen}, and {file} knows none for it",
        hint="compare it with what `cat /etc/ssh/ssh_host_*.pub | ssh-keygen -lf -` says on the machine's own"
        " console, then add `--accept-new-host-keys`",
    )
