"""Which server to talk to, and with which token: `credentials.json`, `server.json` and `SHOAL_*`.

One rule: `SHOAL_URL`, else what `shoal login` chose, else the server of this home. The file is 0600 and
replaced whole. The server of this home has its own entry, `local`, because its address may change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import ServerUnreachable, SpecError
from shoal.home import home_from_env, last_port
from shoal.ownership import Secrecy, problems_on_the_way, refuse_unsafe

LOCAL = "local"
HERE = ("http://127.", "http://localhost:", "http://[::1]:")


class Endpoint(NamedTuple):
    """Where to send a request, and as whom. The token is kept out of `repr`."""

    url: str
    token: str | None
    ca_file: str | None = None
    is_local: bool = False
    chosen_by: str = ""
    """What made it this one, for people; empty where a program named it."""
    home: Path | None = None
    """Where the server at this address lives, if it may be the one of this user's home."""
    listener_uid: int | None = None
    """Who listened there at login, where the address is this machine's."""
    others: tuple[Endpoint, ...] = ()
    """Further control planes of the same cluster, named beside this one."""

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, token={'set' if self.token else 'none'})"


class Credentials:
    """Tokens of this user by server. Every change rewrites the file atomically."""

    def __init__(self, home: Path) -> None:
        self.path = home / "credentials.json"

    @property
    def _way_out(self) -> str:
        return (
            f"move it away: `mv {self.path} {self.path}.bad`; if the control plane is yours alone, "
            "`shoal down` and `shoal up` make another token, else ask an admin for one: `shoal login URL`"
        )

    def load(self) -> dict[str, Any]:
        """`{"current": name, "servers": {name: {"token": ..., "uid": ...}}}`; absent: empty.

        `UnsafePath` where others can read or change it, as ssh refuses a key.
        """
        self._refuse_unsafe()
        try:
            told = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            told = {}
        except (OSError, ValueError) as error:
            raise SpecError(f"cannot read {self.path}: {error}", hint=self._way_out) from error
        if not isinstance(told, dict) or not isinstance(told.get("servers", {}), dict):
            raise SpecError(
                f"{self.path} is not a credentials file",
                hint=self._way_out,
            )
        return {"current": told.get("current"), "servers": told.get("servers", {})}

    def _refuse_unsafe(self) -> None:
        try:
            owner = self.path.stat().st_uid
        except OSError:
            return  # there is none, or reading it says what is wrong
        if os.geteuid() == owner or os.geteuid() != 0:  # root may use what is somebody else's
            refuse_unsafe(problems_on_the_way(self.path, Secrecy.OWNER))

    def token(self, server: str) -> str | None:
        entry = self.load()["servers"].get(server)
        token = entry.get("token") if isinstance(entry, dict) else None
        return token if isinstance(token, str) else None

    def listener_uid(self, server: str) -> int | None:
        entry = self.load()["servers"].get(server)
        uid = entry.get("uid") if isinstance(entry, dict) else None
        return uid if isinstance(uid, int) else None

    def save(self, server: str, token: str, listener_uid: int | None = None) -> None:
        """Remember the token, and who listened; which server is talked to stays as it is."""
        told = self.load()
        known = {} if listener_uid is None else {"uid": listener_uid}
        told["servers"][server] = {"token": token, **known}
        self._write(told)

    def use(self, server: str) -> None:
        """Talk to this server from now on."""
        told = self.load()
        if told["current"] != server:
            self._write({**told, "current": server})

    def forget(self, server: str) -> None:
        told = self.load()
        told["servers"].pop(server, None)
        self._write({**told, "current": None if told["current"] == server else told["current"]})

    def _write(self, told: dict[str, Any]) -> None:
        write_private(self.path, json.dumps(told, indent=2) + "\n")


def write_private(path: Path, text: str) -> None:
    """Replace `path` durably with a file only its owner can read. Readers see the old text or the new."""
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
    """What the control plane of this home wrote when it last listened; it may be gone since."""
    try:
        told = json.loads((home / "server.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return told if isinstance(told, dict) and isinstance(told.get("url"), str) else None


def find_endpoint(env: Mapping[str, str] = os.environ) -> Endpoint:
    """`SHOAL_URL`, else the server last logged in to, else the one of this home, which is also `local`.

    Raises `ServerUnreachable` when there is none. `SHOAL_TOKEN` overrides the saved token.
    """
    home = home_from_env(env)
    saved = Credentials(home)
    override = env.get("SHOAL_TOKEN") or None
    name = env.get("SHOAL_URL") or saved.load()["current"] or LOCAL
    if name != LOCAL:
        urls = spelled(name)
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
    """The server at `url`, which may be the one of `home`, running or not: by its address or its port.

    Several, separated by commas, are control planes of one cluster: the first, with the others beside it.
    """
    first, *others = (
        Endpoint(
            one,
            token,
            chosen_by=chosen_by,
            home=home if _is_of(one, home) else None,
            listener_uid=listener_uid,
        )
        for one in spelled(url).split(",")
    )
    return first._replace(others=tuple(others))


def spelled(urls: str) -> str:
    """Addresses separated by commas as they are remembered: one way to write them."""
    return ",".join(url.strip().rstrip("/") for url in urls.split(",") if url.strip())


def _is_of(url: str, home: Path) -> bool:
    server = read_server_file(home) or {}
    return server.get("url") == url or (url.startswith(HERE) and url.endswith(f":{last_port(home)}"))


def env_for_home(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`env` for a connection to the server of this home, whichever one commands talk to."""
    kept = {k: v for k, v in env.items() if k != "SHOAL_TOKEN" or not env.get("SHOAL_URL")}
    return {**kept, "SHOAL_URL": LOCAL}
