"""Upload the snapshot of a working directory, and ask whether it is already stored."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Query, Request, Response

from shoal.api.archives import Archives
from shoal.api.call import Call, call_of, json_response
from shoal.api.http.problems import WrongMediaType
from shoal.api.queries import ArchiveLookup, ArchiveQuery
from shoal.api.requests import DIGEST_PATTERN
from shoal.api.routing import RouteGroup
from shoal.api.views import schema
from shoal.errors import NotFound, SpecError, TooLarge
from shoal.identity import Permission
from shoal.store import Tx
from shoal.tar_check import TarLimits

MEDIA_TYPES = ("application/x-tar", "application/octet-stream")
routes = RouteGroup("archives")


def archives_of(call: Call) -> Archives:
    """The archives of this control plane."""
    settings = call.core.settings
    limits = settings.limits
    tar_limits = TarLimits(limits.max_archive_files, limits.max_unpacked_bytes)
    return Archives(settings.state_dir, tar_limits, limits.max_project_archive_bytes)


@routes.add("PUT", "/v1/archives/{digest}", Permission.ARCHIVE_WRITE, answers=schema.ArchiveView)
async def put_archive(request: Request, digest: str, query: Annotated[ArchiveQuery, Query()]) -> Response:
    """Store an uncompressed tar file under its SHA-256. Sending it again changes nothing."""
    call = call_of(request)
    name = query.project or call.only_project()
    call.allow(name)
    project = await call.project(name)
    if not re.fullmatch(DIGEST_PATTERN, digest):
        raise SpecError("an archive is named by its SHA-256 in 64 lower-case hexadecimal digits")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in MEDIA_TYPES:
        raise WrongMediaType(f"send the header `Content-Type: {MEDIA_TYPES[0]}`")
    limit = min(project.max_upload_bytes, call.core.settings.limits.max_archive_bytes)
    declared = int(request.headers.get("content-length", limit))
    if declared > limit:
        raise TooLarge(f"the archive has {declared} bytes; the limit of project `{project.name}` is {limit}")
    size = await archives_of(call).receive(project.name, digest, request.stream(), declared, call.check_again)
    view: schema.ArchiveView = {"digest": digest, "size_bytes": size}
    return json_response(view)


@routes.add("GET", "/v1/archives/{digest}", Permission.ARCHIVE_READ, answers=schema.ArchiveView)
async def show_archive(request: Request, digest: str, query: Annotated[ArchiveLookup, Query()]) -> Response:
    """Whether a project of yours has this archive."""
    call = call_of(request)
    archives = archives_of(call)
    is_digest = re.fullmatch(DIGEST_PATTERN, digest) is not None
    for project in await _candidates(call, query.project) if is_digest else ():
        size = archives.size_for(project, digest)
        if size is not None:
            view: schema.ArchiveView = {"digest": digest, "size_bytes": size}
            return json_response(view)
    raise NotFound("no such thing, or one you may not see")


async def _candidates(call: Call, named: str | None) -> tuple[str, ...]:
    """Existing projects of the caller. Names become parts of paths, so none comes from the request."""
    visible = call.visible()

    def names(tx: Tx) -> tuple[str, ...]:
        return tuple(project.name for project in tx.people.projects())

    existing = await call.core.records.store.read(names)
    return tuple(name for name in existing if (visible is None or name in visible) and named in (None, name))
