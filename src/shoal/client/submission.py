"""From what the caller wrote to the body of one submit: spec, secrets' values, the workdir's snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.client.snapshot import Snapshot, take_snapshot
from shoal.client.transport import Transport, path_of
from shoal.errors import NotFound, SpecError
from shoal.spec import JobSpec, parse_job
from shoal.spec.files import load_job


def spec_of(spec: JobSpec | str | Path | None, fields: dict[str, Any]) -> tuple[JobSpec, Path]:
    """The job, and where a relative `workdir` starts: the job file's directory, else the current one."""
    if spec is not None and fields:
        raise SpecError("give a spec or fields, not both", hint="`submit(spec)` or `submit(run=..., ...)`")
    if isinstance(spec, str | Path):
        return load_job(spec), Path(spec).absolute().parent
    return spec if spec is not None else parse_job(fields, source="submit"), Path.cwd()


def body_of(transport: Transport, job: JobSpec, base: Path, env: Mapping[str, str]) -> dict[str, Any]:
    """The request's body. Uploads the working directory if the server does not have it yet."""
    body: dict[str, Any] = {"spec": json.loads(job.canonical_json())}
    if job.secrets:
        body["secrets"] = secrets_from(env, job.secrets)
    snapshot = take_snapshot(base / job.workdir) if job.workdir else None
    if snapshot is not None:
        with snapshot.file:
            # The server keeps archives by project, so one must be named before the upload.
            body["project"] = job.project or only_project(transport)
            body["archive"] = upload(transport, snapshot, body["project"])
    return body


def secrets_from(env: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Values from the submitter's environment; every missing name is reported at once."""
    missing = tuple(name for name in names if name not in env)
    if missing:
        raise SpecError(
            f"secrets not set in your environment: {', '.join(missing)}",
            problems=tuple(f"secret `{name}` is not set in your environment" for name in missing),
            hint=f"`export {missing[0]}=...` and submit again",
        )
    return {name: env[name] for name in names}


def only_project(transport: Transport) -> str:
    """The project of somebody who may submit to one alone. Raises `SpecError` with the choices otherwise."""
    me = transport.call("GET", path_of("me"))
    names = sorted(place["name"] for place in me["projects"] if place["role"] != "viewer")
    if len(names) == 1:
        return str(names[0])
    raise SpecError(
        f"which project? You may submit to: {', '.join(names) or 'none yet'}",
        hint=f"add `--project {names[0]}`" if names else "ask an admin for `shoal project add PROJECT YOU`",
    )


def upload(transport: Transport, snapshot: Snapshot, project: str) -> str:
    """The snapshot's digest, known to the server afterwards; sent only if it is not there yet."""
    path, params = path_of("archives", snapshot.digest), {"project": project}
    try:
        transport.call("GET", path, params=params)
    except NotFound:
        transport.call("PUT", path, params=params, file=snapshot.file)
    return snapshot.digest
