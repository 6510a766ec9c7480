"""Machines over SSH: one connection each, a script and its standard input in, an answer out.

Host keys are checked against `known_hosts`, always. A machine nobody knows yet is refused unless new keys
were explicitly accepted; a key that changed is refused in any case. Only public keys log in: no password is
ever asked for, stored or put on a command line.
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

from shoal.cluster.inventory import Host
from shoal.cluster.machine import Answer
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
    """Decides about host keys that `known_hosts` does not vouch for."""

    def __init__(self, access: Access, known: asyncssh.SSHKnownHosts) -> None:
        self.access = access
        self.known = known
        self.seen = ""
        self.is_changed = False

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.seen = key.get_fingerprint()
        self.is_changed = bool(self.known.match(host, addr, port)[0])
        if self.is_changed or not self.access.accepts_new_keys:
            return False
        place = host if port == 22 else f"[{host}]:{port}"
        words = key.export_public_key("openssh").decode("ascii").split()
        file = self.access.known_hosts_file
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        last = file.read_bytes()[-1:] if file.exists() else b""
        with file.open("a", encoding="ascii") as known:
            known.write("\n" if last not in {b"", b"\n"} else "")  # somebody did not end the last line
            known.write(f"{place} {words[0]} {words[1]}\n")
        return True


class SshMachine:
    """A machine behind an open connection."""

    def __init__(
        self, host: Host, connection: asyncssh.SSHClientConnection, typed: str, *, is_root: bool
    ) -> None:
        """`typed`: by which words a person would log in as we did."""
        self._host = host
        self.typed = typed
        self.as_root = typed if is_root else f"{typed} sudo"
        self._connection = connection
        self._prefix = "" if is_root else 'sudo -n env SSH_CONNECTION="$SSH_CONNECTION" '

    async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> Answer:
        """What the script answered. `EngineUnreachable`: it may or may not have run."""
        # Without content of its own, standard input brings the script: of any length, and read whole first.
        command = f"{self._prefix}sh -c {shlex.quote(script)}" if stdin else f"{self._prefix}sh -s"
        stdin = stdin or f"{{\n{script}\n}} </dev/null\n".encode()
        try:
            # The opening of a channel waits, too, and asyncssh's own limit begins after it.
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
        return Answer(code, _text(done.stdout), _text(done.stderr))

    async def hold(self) -> str:
        """The lock is a process there that reads from us: it ends, and with it the lock, when we are gone."""
        who = shlex.quote(f"{getpass.getuser()}@{socket.gethostname()}")
        script = f"""\
umask 077
exec 9>>{LOCK}
flock -n 9 || {{ echo "busy $(cat {LOCK})"; exit 1; }}
echo {who} "(process $$ there)" >{LOCK}
echo held
exec cat >/dev/null"""
        command = f"{self._prefix}sh -c {shlex.quote(script)}"
        try:
            async with asyncio.timeout(CONNECT_S):
                process = await self._connection.create_process(command)
                told = str(await process.stdout.readline()).strip()
        except (OSError, asyncssh.Error, TimeoutError) as lost:
            raise EngineUnreachable(
                f"{self._host.label}: the connection was lost ({lost})", hint=f"{self.typed} true"
            ) from None
        # Where not even this could be run, what is asked next says why.
        return told.removeprefix("busy").strip() or "somebody" if told.startswith("busy") else ""

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

    async def connect(self, host: Host) -> SshMachine:
        """A machine to run scripts on. Both errors say what to type.

        `EngineUnreachable`: it did not answer. `EngineRefused`: it, or we, would not have the other.
        """
        typed = ssh_words(host.address, host.user, host.port, host.jump, self._access.identity)
        tunnel = await self._jump(host.jump) if host.jump else None
        connection = await self._open(host.address, host.user, host.port, tunnel, host.jump)
        try:
            who = await connection.run("id -u", timeout=CONNECT_S)
        except (OSError, asyncssh.Error) as lost:
            connection.close()
            raise EngineUnreachable(
                f"{host.label} let us in and ran nothing: {lost}", hint=f"{typed} id"
            ) from None
        return SshMachine(host, connection, typed, is_root=str(who.stdout).strip() == "0")

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
        known = _known(file)
        typed = ssh_words(address, user, port, jump, self._access.identity)
        client = _Client(self._access, known)
        options: dict[str, Any] = {
            "known_hosts": known,
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
            told = str(wrong) or f"no answer within {CONNECT_S:g} s"
            raise EngineUnreachable(f"{address} cannot be reached: {told}", hint=f"{typed} true") from None

    async def close(self) -> None:
        for task in self._jumps.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()


def ssh_words(
    address: str, user: str | None, port: int | None, jump: str | None, identity: str | None
) -> str:
    """What a person types to log in there as we do."""
    ways = {"-i": identity, "-p": port, "-J": jump}
    words = [word for flag, way in ways.items() if way for word in (flag, str(way))]
    return shlex.join(["ssh", *words, f"{user}@{address}" if user else address])


def _no_key(
    address: str, user: str | None, port: int | None, jump: str | None, identity: str | None
) -> EngineRefused:
    tried = f"does not take the key {identity}" if identity else "takes none of our keys"
    whose = f"user `{user}`" if user else "the user that ~/.ssh/config or your own login names"
    copier = shlex.join(["ssh-copy-id", *(["-o", f"ProxyJump={jump}"] if jump else [])])  # it has no `-J`
    copied = ssh_words(address, user, port, None, identity).replace("ssh", copier, 1)
    other = "another key" if identity else "a key"
    return EngineRefused(
        f"{address} {tried} for {whose}", hint=f"{copied}, or name {other} with `--identity`"
    )


def _known(file: Path) -> asyncssh.SSHKnownHosts:
    """The host keys in a file; none where there is none. Raises `EngineRefused` with the line that is odd."""
    place, known = str(file), asyncssh.import_known_hosts("")
    hint = f"ls -l {shlex.quote(place)}"
    try:
        for number, line in enumerate(file.read_text("utf-8", "replace").split("\n"), start=1):
            place = f"line {number} of {file}"
            hint = f"sed -n {number}p {shlex.quote(str(file))} shows it"
            known.load(line)
    except FileNotFoundError:
        pass
    except (ValueError, OSError) as wrong:
        raise EngineRefused(
            f"{place} cannot be read: {wrong}",
            hint=f"{hint}; mend it, or name another file with `--known-hosts`",
        ) from None
    return known


def _unknown_key(address: str, client: _Client, file: Path) -> EngineRefused:
    if client.is_changed:
        return EngineRefused(
            f"{address} shows another host key ({client.seen}) than {file} knows: it was reinstalled,"
            " or somebody stands in between",
            hint=f"if it was reinstalled: ssh-keygen -R {address}",
        )
    return EngineRefused(
        f"{address} shows the host key {client.seen}, and {file} knows none for it",
        hint="compare it with what `cat /etc/ssh/ssh_host_*.pub | ssh-keygen -lf -` says on the machine's own"
        " console, then add `--accept-new-host-keys`",
    )
