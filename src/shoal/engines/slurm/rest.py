"""The door of slurmrestd, with a token of Slurm's. Nobody else in this engine opens a socket."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import ssl
import struct
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import structlog

from shoal.engines.slurm.associations import Association
from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Partition
from shoal.engines.slurm.render import Request
from shoal.engines.slurm.rest_parse import (
    Reply,
    associations_in,
    jobs_in,
    nodes_in,
    parse_reply,
    partitions_in,
    versions_in,
)
from shoal.engines.slurm.rest_place import Token, place_of, read_token, renewal
from shoal.engines.slurm.rest_render import RENDERERS
from shoal.engines.slurm.states import Job, is_away, is_for_ever
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.loopback import Stranger, serving

TIMEOUT_S = 30.0
MAX_ANSWER = 512 << 20
OK, NOT_FOUND, BROKEN = 200, 404, 500
UNWELCOME, NOT_NOW = (401, 403, 511), (429, 502, 503, 504)
PAST_S = 30 * 86400.0
"""How far back the accounting is asked."""
CARRIED = ("PATH", "LANG", "LC_ALL", "TZ")
"""Of the control plane's environment to a job, whose user may be none of this machine's."""
FOUND_ANYWHERE = "/usr/local/bin:/usr/bin:/bin"
"""Where `srun` may be on a node, after where it would be here."""
CHECK_URL = (
    "check the URL with whoever runs slurmrestd, then `shoal connect slurm --rest URL --jwt-file FILE`"
)
PING = "`scontrol ping` on a machine of that Slurm says whether slurmctld answers"

log = structlog.get_logger()


class _NotThereError(EngineUnreachable):
    """Somebody answers who does not know this version of the language."""


class RestDoor:
    """`shoal.engines.slurm.door.Door` by HTTP. Every question is a connection of its own, and reads the
    token's file anew: a renewed one is used at once.
    """

    def __init__(self, url: str, jwt_file: str, *, user: str = "", served_by: int | None = None) -> None:
        """`served_by`: the only user on this machine who may be sent the token in clear; None: any."""
        self._url = url
        self._place = place_of(url)
        self._jwt_file = jwt_file
        self._user = user
        self._served_by = served_by
        self._version = ""
        self._release = ""

    def submit(self, request: Request) -> str:
        environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
        environment["PATH"] = f"{environment.get('PATH', '')}:{FOUND_ANYWHERE}".lstrip(":")
        version = self._spoken()
        body = msgspec.json.encode(RENDERERS[version](request, environment))
        status, reply = self._ask("POST", f"/slurm/{version}/job/submit", body)
        if status == OK and reply.job_id:
            return str(reply.job_id)
        told = f"slurmrestd said: {reply.said or status}"
        if is_for_ever(reply.said):
            raise EngineRefused(told, hint="shoal nodes", status=status)
        raise EngineUnreachable(told, hint=PING, status=status)

    def jobs(self) -> list[Job]:
        return jobs_in(self._get("slurm", "jobs"), self.asker())

    def past(self, names: Collection[str]) -> list[Job]:
        since = time.strftime("%Y-%m-%d", time.localtime(time.time() - PAST_S))
        asked = urlencode({"job_name": ",".join(sorted(names)), "start_time": since})
        status, reply = self._ask("GET", f"{self._path('slurmdb', 'jobs')}?{asked}")
        if status != OK or reply.errors:
            log.debug("slurm.no_accounting", status=status, said=reply.said)
            return []
        return [job for job in jobs_in(reply, self.asker(), is_past=True) if job.name in names]

    def nodes(self) -> list[RawNode]:
        return nodes_in(self._get("slurm", "nodes"))

    def partitions(self) -> list[Partition]:
        """v0.0.42 does not tell which is the default, nor which are hidden or for root alone."""
        return partitions_in(self._get("slurm", "partitions"))

    def associations(self) -> list[Association]:
        asked = urlencode({"user": self.asker()})
        try:
            status, reply = self._ask("GET", f"{self._path('slurmdb', 'associations')}?{asked}")
        except EngineUnreachable:  # the same words for a database that is away, and for none
            return []
        return associations_in(reply, self.asker()) if status == OK and not reply.errors else []

    def facts(self) -> SlurmFacts:
        """No version tells how Slurm ends what a job has started, of switches, or of a user's groups."""
        _, reply = self._ask("GET", self._path("slurm", "ping"))
        return SlurmFacts(is_root=self.is_root(), cluster=reply.cluster, heads=reply.heads)

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """Those of these names, by the ids that they have now."""
        for job in self.jobs():
            if job.name in names and job.is_active and user in ("", self.asker()):
                status, reply = self._ask("DELETE", self._path("slurm", f"job/{job.job_id}"))
                if status != OK or reply.said:
                    log.warning("slurm.cancel_failed", name=job.name, status=status, said=reply.said)

    def make_folder(self, path: str) -> None:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)

    def has_folder(self, path: str) -> bool:
        return os.path.isdir(path)  # noqa: PTH112 - what may not be looked at is not there, either

    def outputs(self, folder: str) -> dict[str, int]:
        return {file.name: file.lstat().st_size for file in Path(folder).glob("shoal-*.out")}

    def drop_outputs(self, folder: str, paths: Collection[str]) -> None:
        for path in paths:
            (Path(folder) / path).unlink(missing_ok=True)

    def version(self) -> str:
        spoken = self._spoken()
        return f"slurm {self._release}, by REST {spoken}"

    def is_root(self) -> bool:
        return self.asker() == "root"

    def served_by(self) -> int | None:
        """Who listens there, where the system tells: within this machine."""
        with contextlib.closing(self._connect()) as link:
            return None if self._place.is_tls else _reader(link)

    def asker(self) -> str:
        return self._user or self._token().claims.sun

    def _token(self) -> Token:
        return read_token(self._jwt_file, time.time())

    def _path(self, kind: str, what: str) -> str:
        return f"/{kind}/{self._spoken()}/{what}"

    def _spoken(self) -> str:
        """The newest version that both sides know. Asked once: found anew when it is not there any more."""
        for version in () if self._version else RENDERERS:
            with contextlib.suppress(_NotThereError):
                status, reply = self._ask("GET", f"/slurm/{version}/ping")
                if status == OK:
                    self._release, self._version = reply.release, version
                    break
        if not self._version:
            found = versions_in(self._answer("GET", "/openapi/v3")[1])
            raise EngineUnreachable(
                f"slurmrestd at {self._url} speaks {', '.join(found) or 'no version that it names'}; "
                f"Shoal speaks {', '.join(RENDERERS)}",
                hint="have one of these in its `-s` option, or use Slurm's commands: `--ssh USER@HOST`",
            )
        return self._version

    def _get(self, kind: str, what: str) -> Reply:
        status, reply = self._ask("GET", self._path(kind, what))
        if status != OK or reply.errors:
            raise EngineUnreachable(f"slurmrestd said: {reply.said or status}", hint=PING)
        return reply

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Reply]:
        """An answer that is one: of slurmrestd, about what was asked. Else `EngineUnreachable`."""
        status, text = self._answer(method, path, body)
        reply = parse_reply(text)
        if status in UNWELCOME:
            raise self._unwelcome(f"slurmrestd does not take the token in {self._jwt_file}")
        if status == NOT_FOUND and reply is None:
            self._version = ""
            raise _NotThereError(f"slurmrestd at {self._url} has no {path}", hint=CHECK_URL)
        if reply is None or status in NOT_NOW:
            shown = text[:200].decode("utf-8", "replace").strip()
            raise EngineUnreachable(f"slurmrestd at {self._url} said {status}: {shown}", hint=CHECK_URL)
        if status >= BROKEN and is_away(reply.said):
            # The same words for a slurmctld that is away and for a token that it does not take.
            raise self._unwelcome(
                f"slurmrestd could not ask slurmctld, or the token is no good: {reply.said}"
            )
        return status, reply

    def _unwelcome(self, told: str) -> EngineUnreachable:
        owner = self._token().claims.sun
        if self._user and owner != self._user:
            told = f"{told} (it is {owner}'s, and {self._user} asks)"
        return EngineUnreachable(told, hint=renewal(self._jwt_file, self._user or owner))

    def _answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        token = self._token()
        headers = {"X-SLURM-USER-NAME": self._user or token.claims.sun, "X-SLURM-USER-TOKEN": token.text}
        if body is not None:
            headers["Content-Type"] = "application/json"
        with self._unless_away():
            connection = http.client.HTTPConnection(self._place.host or "localhost", timeout=TIMEOUT_S)
            connection.sock = self._connect()
            with contextlib.closing(connection):
                connection.request(method, f"{self._place.prefix}{path}", body, headers)
                answer = connection.getresponse()
                said = answer.read(MAX_ANSWER + 1)
                if len(said) > MAX_ANSWER:
                    raise http.client.HTTPException(f"it answered with more than {MAX_ANSWER} bytes")
                return answer.status, said

    def _connect(self) -> socket.socket:
        """A connection to whom the token may go."""
        place = self._place
        with self._unless_away():
            link = (
                socket.socket(socket.AF_UNIX)
                if place.file
                else socket.create_connection((place.host, place.port), TIMEOUT_S)
            )
            try:
                if place.file:
                    link.settimeout(TIMEOUT_S)
                    link.connect(place.file)
                if place.is_tls:
                    return ssl.create_default_context().wrap_socket(link, server_hostname=place.host)
                self._refuse_strangers(link)
            except BaseException:
                link.close()
                raise
            return link

    def _refuse_strangers(self, link: socket.socket) -> None:
        if self._served_by is None:
            return
        reader = _reader(link)
        if reader != self._served_by:
            told = f"user {reader} listens at {self._url}; it was user {self._served_by} when you connected"
            raise Stranger(told, f"if that is right: `shoal connect slurm --rest {self._url}` again")

    @contextlib.contextmanager
    def _unless_away(self) -> Iterator[None]:
        try:
            yield
        except Stranger as error:
            raise EngineUnreachable(str(error), hint=error.hint) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnreachable(
                f"slurmrestd at {self._url} did not answer: {str(error) or type(error).__name__}",
                hint=CHECK_URL,
            ) from error


def _reader(link: socket.socket) -> int | None:
    """The user who reads what is sent there; None: the system does not tell."""
    if link.family == socket.AF_UNIX:
        told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", told)[1])
    found = serving(link)
    return found[0].uid if found else None
