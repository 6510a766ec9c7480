"""One submit: the request, the values of its secrets, and a snapshot of its work directory.

It names the snapshot's digest, and uploads the archive only if the server does not have it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from shoal.client.transport import Transport, path_of
from shoal.errors import ArchiveMissing, SpecError

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.client.snapshot import WorkdirSnapshot


def send(
    transport: Transport,
    request: Mapping[str, Any],
    *,
    workdir: Path | None,
    secrets: Sequence[str],
    env: Mapping[str, str],
    key: str | None = None,
    progress: Callable[[str], None] | None = None,
    to: str = "jobs",
) -> dict[str, Any]:
    """Submit and return the server's reply. `request` is `{"spec": ...}` or `{"flags": ...}`; the server
    parses it.

    One request is enough if `workdir` is None, empty, or known to the server already. Repeating it with the
    same `key` gives the same job. `progress` is called with steps that take time. `to`: `jobs` or
    `services`. If files of the folder were not sent, the reply has `left_behind` (see
    `LeftBehindFiles.facts`).
    """
    body = dict(request)
    if secrets:
        body["secrets"] = secrets_from(env, secrets)
    snapshot = _snapshot_of(workdir, request, progress) if workdir is not None else None
    if snapshot is None:
        return _post(transport, to, body, key)
    with snapshot.file as file:
        body["archive"] = snapshot.digest
        if snapshot.left_behind.ignored or snapshot.left_behind.excluded:
            body["left_behind"] = snapshot.left_behind.for_job()
        try:
            answer = _post(transport, to, body, key)
        except ArchiveMissing:
            if progress is not None:
                progress(f"sending the work directory: {snapshot.size_bytes / (1 << 20):,.0f} MiB ...")
            _upload(transport, snapshot.digest, project_of(request), file)
            answer = _post(transport, to, body, key)
        left_behind = snapshot.left_behind
        return (
            {**answer, "left_behind": left_behind.facts()}
            if left_behind.files or left_behind.unused_patterns
            else answer
        )


def secrets_from(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Return values from the submitter's environment. Every missing name is reported at once."""
    missing = tuple(name for name in names if name not in env)
    if missing:
        raise SpecError(
            f"secrets not set in your environment: {', '.join(missing)}",
            problems=tuple(f"secret `{name}` is not set in your environment" for name in missing),
            hint=f"`export {missing[0]}=...` and submit again",
        )
    return {name: env[name] for name in names}


def _snapshot_of(
    workdir: Path, request: Mapping[str, Any], progress: Callable[[str], None] | None
) -> WorkdirSnapshot | None:
    """Return None for an empty directory, which is found out without importing the packer."""
    try:
        with os.scandir(workdir) as entries:
            if next(entries, None) is None:
                return None
    except OSError:
        pass  # the packer reports the problem
    packer = importlib.import_module("shoal.client.snapshot")
    fields: Mapping[str, Any] = request.get("spec") or request.get("flags") or {}
    include, exclude = (_patterns(fields.get(field)) for field in ("include", "exclude"))
    snapshot: WorkdirSnapshot | None = packer.take_snapshot(
        workdir, include=include, exclude=exclude, progress=progress
    )
    return snapshot


def _patterns(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _post(transport: Transport, to: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    return dict(transport.call("POST", path_of(to), json_body=body, key=key))


def _upload(transport: Transport, digest: str, project: str | None, file: IO[bytes]) -> None:
    transport.call("PUT", path_of("archives", digest), params={"project": project}, file=file)


def project_of(request: Mapping[str, Any]) -> str | None:
    """Return the project as the sender named it. None leaves the choice to the server, as in the submit
    itself.
    """
    fields: Mapping[str, Any] = request.get("spec") or request.get("flags") or {}
    return fields.get("project")
