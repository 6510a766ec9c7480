"""Which names this server answers to: a page that points its own name at our address is not one of them."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import urlsplit

from shoal.api.problems import WrongHost
from shoal.settings import LOOPBACK, Settings

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared only
_HOST = re.compile(r"(?:\[([0-9a-f:.]{2,45})\]|([a-z0-9._-]{1,253}))(?::[0-9]{1,5})?", re.ASCII)


class HostCheck:
    """Loopback names, the address we listen on, and the names the operator declared."""

    def __init__(self, settings: Settings) -> None:
        reached = {urlsplit(url).hostname or "" for url in settings.reach}
        names = {*LOOPBACK, settings.host, *settings.allowed_hosts, *reached} - {""}
        self._names = frozenset(name.lower().rstrip(".") for name in names)
        # Bound to every address: an IP literal cannot be rebound, so any of ours will do.
        self._takes_addresses = settings.host in EVERYWHERE
        self._last = b""
        """The header that was found good last: clients of one server send the same."""

    def check(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Raise `WrongHost` unless there is one Host header with a name of ours."""
        found = [value for name, value in headers if name == b"host"]
        if len(found) != 1:
            raise WrongHost("the request names no host, or more than one")
        if found[0] == self._last:
            return
        name = _name(found[0].decode("latin-1"))
        if name in self._names or (self._takes_addresses and _is_address(name)):
            self._last = found[0]
            return
        raise WrongHost(
            "this server does not answer to the host name of the request",
            hint="an operator can add it: `shoal up --allowed-hosts NAME`",
        )


def _name(host: str) -> str:
    """The name without port and brackets; empty, and so nobody's, for anything malformed."""
    match = _HOST.fullmatch(host.lower())
    return (match[1] or match[2]).rstrip(".") if match else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
