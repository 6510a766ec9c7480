"""The transport by slurmrestd, with a Slurm token. No other module of this engine opens a socket."""

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

from shoal.engines.slurm.nodes import RawNode
from shoal.engines.slurm.parse import SlurmFacts
from shoal.engines.slurm.partitions import Association, Partition
from shoal.engines.slurm.render import SlurmJobRequest
from shoal.engines.slurm.rest_parse import (
    RestReply,
    associations_in,
    jobs_in,
    nodes_in,
    parse_reply,
    partitions_in,
    versions_in,
)
from shoal.engines.slurm.rest_request import RENDERERS, SlurmToken, parse_endpoint, read_token, renewal_hint
from shoal.engines.slurm.states import SlurmJob, is_permanent, is_unreachable
from shoal.errors import EngineRefused, EngineUnreachable
from shoal.local_sockets import UnexpectedListener, socket_owners

TIMEOUT_S = 30.0
MAX_ANSWER = 512 << 20
OK, NOT_FOUND, SERVER_ERROR = 200, 404, 500
UNAUTHORIZED, RETRYABLE = (401, 403, 511), (429, 502, 503, 504)
ACCOUNTING_WINDOW_S = 30 * 86400.0
"""How far back accounting is asked."""
CARRIED = ("PATH", "LANG", "LC_ALL", "TZ")
"""The variables of the control plane that a job gets, whose user may not exist on this machine."""
FOUND_ANYWHERE = "/usr/local/bin:/usr/bin:/bin"
"""Where `srun` may be on a node, after the places where it would be here."""
CHECK_URL = (
    "check the URL with whoever runs slurmrestd, then `shoal connect slurm --rest URL --jwt-file FILE`"
)
PING = "`scontrol ping` on a machine of that Slurm says whether slurmctld answers"

log = structlog.get_logger()


class _NotThereError(EngineUnreachable):
    """A server replies that does not know this version of the API."""


class RestTransport:
    """A `SlurmTransport` by HTTP. Every request has its own connection and reads the token's file again, so
    a renewed token is used at once.
    """

    def __init__(self, url: str, jwt_file: str, *, user: str = "", served_by: int | None = None) -> None:
        """Create the transport. `served_by`: the only local user that may get the token in clear; None:
        any.
        """
        self._url = url
        self._endpoint = parse_endpoint(url)
        self._jwt_file = jwt_file
        self._user = user
        self._served_by = served_by
        self._version = ""
        self._release = ""

    def submit(self, request: SlurmJobRequest) -> str:
        environment = {name: os.environ[name] for name in CARRIED if name in os.environ}
        environment["PATH"] = f"{environment.get('PATH', '')}:{FOUND_ANYWHERE}".lstrip(":")
        version = self._api_version()
        body = msgspec.json.encode(RENDERERS[version](request, environment))
        status, reply = self._ask("POST", f"/slurm/{version}/job/submit", body)
        if status == OK and reply.job_id:
            return str(reply.job_id)
        message = f"slurmrestd said: {reply.error_text or status}"
        if is_permanent(reply.error_text):
            raise EngineRefused(message, hint="shoal nodes", status=status)
        raise EngineUnreachable(message, hint=PING, status=status)

    def jobs(self) -> list[SlurmJob]:
        return jobs_in(self._get("slurm", "jobs"), self.account_name())

    def accounting_jobs(self, names: Collection[str]) -> list[SlurmJob]:
        since = time.strftime("%Y-%m-%d", time.localtime(time.time() - ACCOUNTING_WINDOW_S))
        query = urlencode({"job_name": ",".join(sorted(names)), "start_time": since})
        status, reply = self._ask("GET", f"{self._path('slurmdb', 'jobs')}?{query}")
        if status != OK or reply.errors:
            log.debug("slurm.no_accounting", status=status, said=reply.error_text)
            return []
        return [job for job in jobs_in(reply, self.account_name(), is_past=True) if job.name in names]

    def nodes(self) -> list[RawNode]:
        return nodes_in(self._get("slurm", "nodes"))

    def partitions(self) -> list[Partition]:
        """v0.0.42 does not report which partition is the default, hidden, or for root alone."""
        return partitions_in(self._get("slurm", "partitions"))

    def associations(self) -> list[Association]:
        query = urlencode({"user": self.account_name()})
        try:
            status, reply = self._ask("GET", f"{self._path('slurmdb', 'associations')}?{query}")
        except EngineUnreachable:  # the same reply if the database is away or does not exist
            return []
        return associations_in(reply, self.account_name()) if status == OK and not reply.errors else []

    def facts(self) -> SlurmFacts:
        """No version reports how Slurm ends a job's processes, switches, or a user's groups."""
        _, reply = self._ask("GET", self._path("slurm", "ping"))
        return SlurmFacts(is_root=self.is_root(), cluster=reply.cluster, heads=reply.heads)

    def cancel(self, names: Collection[str], user: str = "") -> None:
        """Cancel the jobs of these names, by their current ids."""
        for job in self.jobs():
            if job.name in names and job.is_active and user in ("", self.account_name()):
                status, reply = self._ask("DELETE", self._path("slurm", f"job/{job.job_id}"))
                if status != OK or reply.error_text:
                    log.warning("slurm.cancel_failed", name=job.name, status=status, said=reply.error_text)

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
        version = self._api_version()
        return f"slurm {self._release}, by REST {version}"

    def is_root(self) -> bool:
        return self.account_name() == "root"

    def served_by(self) -> int | None:
        """Return the user that listens there, if the system reports it: on this machine only."""
        with contextlib.closing(self._connect()) as link:
            return None if self._endpoint.is_tls else _peer_uid(link)

    def account_name(self) -> str:
        return self._user or self._token().claims.sun

    def _token(self) -> SlurmToken:
        return read_token(self._jwt_file, time.time())

    def _path(self, kind: str, resource: str) -> str:
        return f"/{kind}/{self._api_version()}/{resource}"

    def _api_version(self) -> str:
        """Return the newest version that both sides know. Asked once, and again if that version is gone."""
        for version in () if self._version else RENDERERS:
            with contextlib.suppress(_NotThereError):
                status, reply = self._ask("GET", f"/slurm/{version}/ping")
                if status == OK:
                    self._release, self._version = reply.release, version
                    break
        if not self._version:
            versions = versions_in(self._answer("GET", "/openapi/v3")[1])
            raise EngineUnreachable(
                f"slurmrestd at {self._url} speaks {', '.join(versions) or 'no version that it names'}; "
                f"Shoal speaks {', '.join(RENDERERS)}",
                hint="have one of these in its `-s` option, or use Slurm's commands: `--ssh USER@HOST`",
            )
        return self._version

    def _get(self, kind: str, resource: str) -> RestReply:
        status, reply = self._ask("GET", self._path(kind, resource))
        if status != OK or reply.errors:
            raise EngineUnreachable(f"slurmrestd said: {reply.error_text or status}", hint=PING)
        return reply

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, RestReply]:
        """Return a valid reply of slurmrestd to this request. Otherwise raise `EngineUnreachable`."""
        status, text = self._answer(method, path, body)
        reply = parse_reply(text)
        if status in UNAUTHORIZED:
            raise self._unauthorized_error(f"slurmrestd does not take the token in {self._jwt_file}")
        if status == NOT_FOUND and reply is None:
            self._version = ""
            raise _NotThereError(f"slurmrestd at {self._url} has no {path}", hint=CHECK_URL)
        if reply is None or status in RETRYABLE:
            shown = text[:200].decode("utf-8", "replace").strip()
            raise EngineUnreachable(f"slurmrestd at {self._url} said {status}: {shown}", hint=CHECK_URL)
        if status >= SERVER_ERROR and is_unreachable(reply.error_text):
            # The same message means that slurmctld is away and that it rejects the token.
            raise self._unauthorized_error(
                f"slurmrestd could not ask slurmctld, or the token is no good: {reply.error_text}"
            )
        return status, reply

    def _unauthorized_error(self, message: str) -> EngineUnreachable:
        owner = self._token().claims.sun
        if self._user and owner != self._user:
            message = f"{message} (it is {owner}'s, and {self._user} asks)"
        return EngineUnreachable(message, hint=renewal_hint(self._jwt_file, self._user or owner))

    def _answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        token = self._token()
        headers = {"X-SLURM-USER-NAME": self._user or token.claims.sun, "X-SLURM-USER-TOKEN": token.text}
        if body is not None:
            headers["Content-Type"] = "application/json"
        with self._unless_away():
            connection = http.client.HTTPConnection(self._endpoint.host or "localhost", timeout=TIMEOUT_S)
            connection.sock = self._connect()
            with contextlib.closing(connection):
                connection.request(method, f"{self._endpoint.prefix}{path}", body, headers)
                response = connection.getresponse()
                body_read = response.read(MAX_ANSWER + 1)
                if len(body_read) > MAX_ANSWER:
                    raise http.client.HTTPException(f"it answered with more than {MAX_ANSWER} bytes")
                return response.status, body_read

    def _connect(self) -> socket.socket:
        """Return a connection to a server that may get the token."""
        endpoint = self._endpoint
        with self._unless_away():
            link = (
                socket.socket(socket.AF_UNIX)
                if endpoint.file
                else socket.create_connection((endpoint.host, endpoint.port), TIMEOUT_S)
            )
            try:
                if endpoint.file:
                    link.settimeout(TIMEOUT_S)
                    link.connect(endpoint.file)
                if endpoint.is_tls:
                    return ssl.create_default_context().wrap_socket(link, server_hostname=endpoint.host)
                self._refuse_strangers(link)
            except BaseException:
                link.close()
                raise
            return link

    def _refuse_strangers(self, link: socket.socket) -> None:
        if self._served_by is None:
            return
        listener_uid = _peer_uid(link)
        if listener_uid != self._served_by:
            message = (
                f"user {listener_uid} listens at {self._url}; "
                f"it was user {self._served_by} when you connected"
            )
            raise UnexpectedListener(
                message, f"if that is right: `shoal connect slurm --rest {self._url}` again"
            )

    @contextlib.contextmanager
    def _unless_away(self) -> Iterator[None]:
        try:
            yield
        except UnexpectedListener as error:
            raise EngineUnreachable(str(error), hint=error.hint) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineUnreachable(
                f"slurmrestd at {self._url} did not answer: {str(error) or type(error).__name__}",
                hint=CHECK_URL,
            ) from error


def _peer_uid(link: socket.socket) -> int | None:
    """Return the user who reads what is sent there; None: the system does not report it."""
    if link.family == socket.AF_UNIX:
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[1])
    owners = socket_owners(link)
    return owners[0].uid if owners else None
