"""Where slurmrestd is asked, and with whose token. Opens no socket.

A token is all of its user's rights in Slurm: it goes over TLS, over loopback or to a socket's file, never
over a network in clear, and lies in a file that its owner alone can read.
"""

from __future__ import annotations

import base64
import binascii
import stat
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from shoal.errors import EngineUnreachable, SpecError

LIFESPAN_S = 86400
"""What our hints ask for; Slurm itself would give half an hour."""
PREFIX = "SLURM_JWT="
"""In front of the token, as `scontrol token` prints it."""


class Place(msgspec.Struct, frozen=True):
    host: str = ""
    port: int = 0
    is_tls: bool = False
    file: str = ""
    """Of a socket, instead of host and port."""
    prefix: str = ""
    """Of every path, where slurmrestd stands behind another server."""


class Claims(msgspec.Struct, frozen=True):
    """What a token says of itself. Nobody here can check it; slurmctld does."""

    sun: str = ""
    """The user."""
    exp: float | None = None
    """When it ends, by the wall clock."""


class Token(msgspec.Struct, frozen=True):
    text: str
    claims: Claims


def place_of(url: str) -> Place:
    """`https://HOST[:PORT]`, `http://` to loopback alone, or `unix:/PATH`. `SpecError`: anything else."""
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path.startswith("/"):
        return Place(file=parts.path)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.username:
        raise SpecError(
            f"{url!r} is no place where slurmrestd can be asked",
            hint="`--rest https://HOST:6820`, `--rest http://127.0.0.1:6820` or `--rest unix:/PATH`",
        )
    is_tls = parts.scheme == "https"
    if not is_tls and not _is_loopback(parts.hostname):
        raise SpecError(
            f"a token would go to {parts.hostname} in clear: whoever listens on the way could use it",
            hint=f"`--rest https://{parts.hostname}`, or a tunnel: `ssh -N -L 6820:127.0.0.1:6820 HOST`",
        )
    default = 443 if is_tls else 80
    return Place(parts.hostname, port or default, is_tls, prefix=parts.path.rstrip("/"))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: str, now: float) -> Token:
    """As it is now: it may have been renewed. `EngineUnreachable`: it cannot be used, and what to type."""
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip().removeprefix(PREFIX)
    except (OSError, UnicodeDecodeError) as error:
        raise EngineUnreachable(
            f"the token file {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint=renewal(file),
        ) from error
    if mode & 0o077:
        raise EngineUnreachable(
            f"the token file {path} has mode {mode:04o}: others can read it, and submit jobs with it",
            hint=f"chmod 600 {path}",
        )
    claims = claims_of(text)
    if claims is None:
        raise EngineUnreachable(f"the token file {path} holds no token of Slurm's", hint=renewal(file))
    if claims.exp is not None and claims.exp <= now:
        raise EngineUnreachable(
            f"the token in {path} expired {now - claims.exp:.0f} s ago; `scontrol token` makes a new one",
            hint=renewal(file, claims.sun),
        )
    return Token(text, claims)


def claims_of(text: str) -> Claims | None:
    """None: this is no token."""
    parts = text.split(".")
    if len(parts) != 3 or not text.isprintable() or " " in text:
        return None
    try:
        told = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(told, type=Claims)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return None


def renewal(file: str, user: str = "") -> str:
    """What to type where Slurm's commands are. Without a name it is a token of whoever types it."""
    name = f" username={user}" if user else ""
    return f"on a login node: `(umask 077; scontrol token{name} lifespan={LIFESPAN_S} > {file})`"
