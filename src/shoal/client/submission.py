"""One submit: the job as asked for, its secrets' values, its working directory's snapshot.

Sends no archive that the server has already: it names the digest, and uploads only when told to.
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

    from shoal.client.snapshot import Snapshot


def send(
    transport: Transport,
    asked: Mapping[str, Any],
    *,
    workdir: Path | None,
    secrets: Sequence[str],
    env: Mapping[str, str],
    key: str | None = None,
    progress: Callable[[str], None] | None = None,
    to: str = "jobs",
) -> dict[str, Any]:
    """The server's answer. `asked` is `{"spec": ...}` or `{"flags": ...}`; the server reads either.

    One request where `workdir` is None, empty or known to the server already. Repeating it with the same
    `key` gives the same job. `progress` is told what takes time. `to`: `jobs` or `services`. Where
    files of the folder did not travel, the answer has `left_behind` (see `LeftBehind.facts`).
    """
    body = dict(asked)
    if secrets:
        body["secrets"] = secrets_from(env, secrets)
    snapshot = _snapshot_of(workdir, asked, progress) if workdir is not None else None
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
            _upload(transport, snapshot.digest, project_of(asked), file)
            answer = _post(transport, to, body, key)
        behind = snapshot.left_behind
        return {**answer, "left_behind": behind.facts()} if behind.files or behind.useless else answer


def secrets_from(env: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Values from the submitter's environment; every missing name is reported at once."""
    missing = tuple(name for name in names if name not in env)
    if missing:
        raise SpecError(
            f"secrets not set in your environment: {', '.join(missing)}",
            problems=tuple(f"secret `{name}` is not set in your environment" for name in missing),
            hint=f"`export {missing[0]}=...` and submit again",
        )
    return {name: env[name] for name in names}


def _snapshot_of(
    workdir: Path, asked: Mapping[str, Any], progress: Callable[[str], None] | None
) -> Snapshot | None:
    """None for a directory with nothing in it, found out without loading what packs one."""
    try:
        with os.scandir(workdir) as entries:
            if next(entries, None) is None:
                return None
    except OSError:
        pass  # said in words below
    packer = importlib.import_module("shoal.client.snapshot")
    told: Mapping[str, Any] = asked.get("spec") or asked.get("flags") or {}
    include, exclude = (_patterns(told.get(field)) for field in ("include", "exclude"))
    taken: Snapshot | None = packer.take_snapshot(
        workdir, include=include, exclude=exclude, progress=progress
    )
    return taken


def _patterns(told: object) -> tuple[str, ...]:
    if isinstance(told, str):
        return (told,)
    return tuple(map(str, told)) if isinstance(told, list | tuple) else ()


def _post(transport: Transport, to: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    return dict(transport.call("POST", path_of(to), json_body=body, key=key))


def _upload(transport: Transport, digest: str, project: str | None, file: IO[bytes]) -> None:
    transport.call("PUT", path_of("archives", digest), params={"project": project}, file=file)


def project_of(asked: Mapping[str, Any]) -> str | None:
    """The project as the sender named it; None leaves the choice to the server, as in the submit itself."""
    told: Mapping[str, Any] = asked.get("spec") or asked.get("flags") or {}
    return told.get("project")
