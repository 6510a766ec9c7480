"""Requests to slurmrestd: its address, the token, and the body of a job in each API version. Opens no
socket. Pure.

A token has all rights of its user in Slurm. So it goes over TLS, over loopback or to a socket file, never
over a network in clear, and lies in a file that only its owner can read.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from shoal.engines.slurm.partitions import UNLIMITED
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.errors import EngineUnreachable, SpecError

LIFESPAN_S = 86400
"""The lifespan in our hints; Slurm's default is half an hour."""
PREFIX = "SLURM_JWT="
"""In front of the token, as `scontrol token` prints it."""


class RestEndpoint(msgspec.Struct, frozen=True):
    host: str = ""
    port: int = 0
    is_tls: bool = False
    file: str = ""
    """The path of a socket, instead of host and port."""
    prefix: str = ""
    """The prefix of every path, if slurmrestd is behind another server."""


class TokenClaims(msgspec.Struct, frozen=True):
    """The token's claims, which only slurmctld can verify."""

    sun: str = ""
    """The user."""
    exp: float | None = None
    """When it ends, by the wall clock."""


class SlurmToken(msgspec.Struct, frozen=True):
    text: str
    claims: TokenClaims


def parse_endpoint(url: str) -> RestEndpoint:
    """Parse `https://HOST[:PORT]`, `http://` to loopback alone, or `unix:/PATH`. `SpecError`: anything
    else.
    """
    parts = urlsplit(url)
    if parts.scheme == "unix" and parts.path.startswith("/"):
        return RestEndpoint(file=parts.path)
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
            f"a token would go to {parts.hostname} in clear: any listener on the way could use it",
            hint=f"`--rest https://{parts.hostname}`, or a tunnel: `ssh -N -L 6820:127.0.0.1:6820 HOST`",
        )
    default = 443 if is_tls else 80
    return RestEndpoint(parts.hostname, port or default, is_tls, prefix=parts.path.rstrip("/"))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_token(file: str, now: float) -> SlurmToken:
    """Read the token from its file, as it may have been renewed. `EngineUnreachable`: it cannot be used."""
    path = Path(file)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip().removeprefix(PREFIX)
    except (OSError, UnicodeDecodeError) as error:
        raise EngineUnreachable(
            f"the token file {path} cannot be read: {getattr(error, 'strerror', None) or error}",
            hint=renewal_hint(file),
        ) from error
    if mode & 0o077:
        raise EngineUnreachable(
            f"the token file {path} has mode {mode:04o}: others can read it, and submit jobs with it",
            hint=f"chmod 600 {path}",
        )
    claims = parse_claims(text)
    if claims is None:
        raise EngineUnreachable(f"the token file {path} holds no token of Slurm's", hint=renewal_hint(file))
    if claims.exp is not None and claims.exp <= now:
        raise EngineUnreachable(
            f"the token in {path} expired {now - claims.exp:.0f} s ago; `scontrol token` makes a new one",
            hint=renewal_hint(file, claims.sun),
        )
    return SlurmToken(text, claims)


def parse_claims(text: str) -> TokenClaims | None:
    """Parse the claims. None: this is no token."""
    parts = text.split(".")
    if len(parts) != 3 or not text.isprintable() or " " in text:
        return None
    try:
        payload = base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4))
        return msgspec.json.decode(payload, type=TokenClaims)
    except (binascii.Error, ValueError, msgspec.DecodeError):
        return None


def renewal_hint(file: str, user: str = "") -> str:
    """Return what to type on a machine with Slurm's commands. Without a user it creates a token of the
    person who types.
    """
    name = f" username={user}" if user else ""
    return f"on a login node: `(umask 077; scontrol token{name} lifespan={LIFESPAN_S} > {file})`"


Body = dict[str, Any]
Renderer = Callable[[SlurmJobRequest, Mapping[str, str]], Body]


def job_v38(request: SlurmJobRequest, environment: Mapping[str, str]) -> Body:
    """Return the job for Slurm 22.05, whose names are `sbatch`'s words in an odd spelling.

    It ignores a list of `nodes`, refuses `required_nodes` and `tres_per_node`, and takes any `requeue` for
    yes.
    """
    job = {
        "nodes": str(len(request.nodes)),
        "nodelist": ",".join(request.nodes),
        "no_requeue": True,
        "no_kill": "set",
        "gres": request.gres,
        "memory_per_node": request.memory_mb,
        "time_limit": _minutes(request),
        "environment": dict(environment),
    }
    return {"script": request.script, "job": _without_empty(_common_fields(request) | job)}


def job_v42(request: SlurmJobRequest, environment: Mapping[str, str]) -> Body:
    """Return the job for Slurm 24.11."""
    job = {
        "script": request.script,
        "minimum_nodes": len(request.nodes),
        "maximum_nodes": len(request.nodes),
        "required_nodes": list(request.nodes),
        "requeue": False,
        "kill_on_node_fail": False,
        "tres_per_node": ",".join(f"gres/{gres}" for gres in request.gres.split(",") if gres),
        "memory_per_node": _number(request.memory_mb),
        "time_limit": _number(_minutes(request)) or _infinite(request),
        "environment": [f"{name}={value}" for name, value in environment.items()],
    }
    return {"job": _without_empty(_common_fields(request) | job)}


RENDERERS: dict[str, Renderer] = {"v0.0.42": job_v42, "v0.0.38": job_v38}
"""By version, in order of preference."""


def _common_fields(request: SlurmJobRequest) -> Body:
    return {
        "name": request.name,
        "comment": request.comment,
        "tasks": len(request.nodes),
        "tasks_per_node": 1,
        "cpus_per_task": request.cpus,
        "current_working_directory": "/",
        "open_mode": "append",
        "standard_output": request.output,
        "partition": request.partition,
        "account": request.account,
        "qos": request.qos,
    }


def _minutes(request: SlurmJobRequest) -> int:
    """Return the minutes; 0: the site's longest or default time."""
    return int(request.time) if request.time.isdigit() else 0


def _infinite(request: SlurmJobRequest) -> Body | None:
    return {"set": True, "infinite": True, "number": 0} if request.time == UNLIMITED else None


def _number(value: int) -> Body | None:
    return {"set": True, "infinite": False, "number": value} if value else None


def _without_empty(job: Body) -> Body:
    """Return the job without empty values, which are left to the site."""
    return {name: value for name, value in job.items() if value is False or value}
