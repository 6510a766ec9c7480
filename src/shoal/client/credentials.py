"""Choose the server and the token: `credentials.json`, `server.json` and `SHOAL_*`.

The order is `SHOAL_URL`, then what `shoal login` chose, then the server of this home. The file is 0600 and
replaced whole. The server of this home has its own entry, `local`, because its address may change.

`refuse_strangers` checks which process on this machine may get a token over plain HTTP, because a job can
take the port of a server that is down. It runs after connecting and before anything is sent.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ServerUnreachable, SpecError
from shoal.home import LOCK, home_from_env, last_port, pid_holding
from shoal.local_sockets import (
    FIRST_PROJECT_UID,
    SocketOwner,
    UnexpectedListener,
    is_loopback,
    socket_owners,
    sockets_of,
)
from shoal.ownership import Secrecy, problems_on_path, refuse_unsafe

LOCAL = "local"
HERE = ("http://127.", "http://localhost:", "http://[::1]:")


class Endpoint(NamedTuple):
    """Where to send a request, and with which token. The token is kept out of `repr`."""

    url: str
    token: str | None
    ca_file: str | None = None
    is_local: bool = False
    chosen_by: str = ""
    """What chose this endpoint, as shown to people; empty if a program named it."""
    home: Path | None = None
    """The home of the server at this address, if it may be this user's home."""
    listener_uid: int | None = None
    """User id of the listener at login, if the address is on this machine."""
    others: tuple[Endpoint, ...] = ()
    """Further control planes of the same cluster, named together with this one."""

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, token={'set' if self.token else 'none'})"


class Credentials:
    """This user's tokens by server. Every change rewrites the file atomically."""

    def __init__(self, home: Path) -> None:
        self.path = home / "credentials.json"

    @property
    def _way_out(self) -> str:
        return (
            f"move it away: `mv {self.path} {self.path}.bad`; if the control plane is yours alone, "
            "`shoal down` and `shoal up` make another token, else ask an admin for one: `shoal login URL`"
        )

    def load(self) -> dict[str, Any]:
        """Return `{"current": name, "servers": {name: {"token": ..., "uid": ...}}}`; empty if there is no
        file.

        `UnsafePath` if other users can read or change it, as ssh refuses a key.
        """
        self._refuse_unsafe()
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            content = {}
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot read {self.path}: {error}", hint=self._way_out) from error
        if not isinstance(content, dict) or not isinstance(content.get("servers", {}), dict):
            raise SpecError(
                f"{self.path} is not a credentials file",
                hint=self._way_out,
            )
        return {"current": content.get("current"), "servers": content.get("servers", {})}

    def _refuse_unsafe(self) -> None:
        try:
            owner = self.path.stat().st_uid
        except OSError:
            return  # there is no file, or reading it reports the problem
        if os.geteuid() == owner or os.geteuid() != 0:  # root may use another user's file
            refuse_unsafe(problems_on_path(self.path, Secrecy.OWNER))

    def token(self, server: str) -> str | None:
        entry = self.load()["servers"].get(server)
        token = entry.get("token") if isinstance(entry, dict) else None
        return token if isinstance(token, str) else None

    def listener_uid(self, server: str) -> int | None:
        entry = self.load()["servers"].get(server)
        uid = entry.get("uid") if isinstance(entry, dict) else None
        return uid if isinstance(uid, int) else None

    def save(self, server: str, token: str, listener_uid: int | None = None) -> None:
        """Save the token and the listener's user id. The current server does not change."""
        content = self.load()
        entry = {} if listener_uid is None else {"uid": listener_uid}
        content["servers"][server] = {"token": token, **entry}
        self._write(content)

    def use(self, server: str) -> None:
        """Make this the current server."""
        content = self.load()
        if content["current"] != server:
            self._write({**content, "current": server})

    def forget(self, server: str) -> None:
        content = self.load()
        content["servers"].pop(server, None)
        self._write({**content, "current": None if content["current"] == server else content["current"]})

    def _write(self, content: dict[str, Any]) -> None:
        write_private(self.path, json.dumps(content, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace `path` durably with a file that only its owner can read. Readers see the old text
    or the new.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_server_file(home: Path) -> dict[str, Any] | None:
    """Return what the control plane of this home wrote when it last listened. It may be gone by now."""
    try:
        facts = json.loads((home / "server.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("url"), str) else None


def find_endpoint(env: Mapping[str, str] = os.environ) -> Endpoint:
    """Return the endpoint: `SHOAL_URL`, else the server last logged in to, else the one of this home
    (`local`).

    Raises `ServerUnreachable` if there is none. `SHOAL_TOKEN` overrides the saved token.
    """
    home = home_from_env(env)
    saved = Credentials(home)
    override = env.get("SHOAL_TOKEN") or None
    name = env.get("SHOAL_URL") or saved.load()["current"] or LOCAL
    if name != LOCAL:
        urls = normalize_urls(name)
        why = "SHOAL_URL" if env.get("SHOAL_URL") else "shoal login"
        token = override or saved.token(urls)
        return endpoint_at(urls, token, home, chosen_by=why, listener_uid=saved.listener_uid(urls))
    server = read_server_file(home)
    if server is None:
        raise ServerUnreachable(
            f"no control plane is running in {home}",
            hint="start one with `shoal up`, or name one with `shoal login URL`",
        )
    token = override or saved.token(LOCAL)
    ca_file = server.get("tls_cert")
    return Endpoint(server["url"], token, ca_file, is_local=True, chosen_by="this machine", home=home)


def endpoint_at(
    url: str, token: str | None, home: Path, *, chosen_by: str = "", listener_uid: int | None = None
) -> Endpoint:
    """Return the server at `url`. By its address or port it may be the one of `home`, running or not.

    Several URLs, separated by commas, are control planes of one cluster: the first, with the others attached.
    """
    first, *others = (
        Endpoint(
            address,
            token,
            chosen_by=chosen_by,
            home=home if _is_of(address, home) else None,
            listener_uid=listener_uid,
        )
        for address in normalize_urls(url).split(",")
    )
    return first._replace(others=tuple(others))


def normalize_urls(urls: str) -> str:
    """Normalize addresses separated by commas to the one form in which they are saved."""
    return ",".join(url.strip().rstrip("/") for url in urls.split(",") if url.strip())


def _is_of(url: str, home: Path) -> bool:
    server = read_server_file(home) or {}
    return server.get("url") == url or (url.startswith(HERE) and url.endswith(f":{last_port(home)}"))


def env_for_home(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `env` for a connection to the server of this home, whichever server commands use."""
    base = {k: v for k, v in env.items() if k != "SHOAL_TOKEN" or not env.get("SHOAL_URL")}
    return {**base, "SHOAL_URL": LOCAL}


def refuse_strangers(link: socket.socket, endpoint: Endpoint) -> int | None:
    """Raise `UnexpectedListener` unless the listener may be the server. Return its user id if known.

    The server of a home is the process that holds the home: without root, jobs run as the same user, so the
    user id alone proves nothing. A server of another user is checked by its user id: it must be the one seen
    at login, and never that of a project.
    """
    if endpoint.home is None and not is_loopback(link):
        return None
    listeners = socket_owners(link)
    if listeners is None:
        return None
    port = link.getpeername()[1]
    is_own = endpoint.is_local or any(listener.uid == os.geteuid() for listener in listeners)
    if endpoint.home is not None and is_own:
        _refuse_other_processes(listeners, endpoint.home, port)
    else:
        _refuse_other_users(listeners, endpoint, port)
    return listeners[0].uid


def _refuse_other_processes(listeners: tuple[SocketOwner, ...], home: Path, port: int) -> None:
    pid = pid_holding(home)
    server_sockets = sockets_of(pid, with_open=home / LOCK) if pid else frozenset()
    for listener in listeners:
        # Only root can look into root's processes, but no job runs as root.
        if listener.inode not in server_sockets and (listener.uid != 0 or os.geteuid() == 0 or pid is None):
            runs = f"process {pid} is the control plane" if pid else "no control plane runs"
            raise UnexpectedListener(
                f"{runs} in {home}, and port {port} is held by {listener}", "start it with `shoal up`"
            )


def _refuse_other_users(listeners: tuple[SocketOwner, ...], endpoint: Endpoint, port: int) -> None:
    uid_at_login = endpoint.listener_uid
    for listener in listeners:
        if uid_at_login is not None and listener.uid != uid_at_login:
            raise UnexpectedListener(
                f"port {port} is held by {listener}; when you logged in it was user {uid_at_login}",
                f"start the server again (`shoal up`), or if it moved: `shoal login {endpoint.url}`",
            )
        if listener.uid >= FIRST_PROJECT_UID:
            raise UnexpectedListener(
                f"port {port} is held by {listener}, "
                f"and users from {FIRST_PROJECT_UID} on are projects' jobs",
                "start the server again: `shoal up`",
            )
