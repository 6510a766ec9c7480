"""From what the caller wrote to the body of one submit: spec, secrets' values, the workdir's snapshot."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.client.snapshot import take_snapshot
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
    if job.workdir:
        digest = upload_workdir(transport, base / job.workdir, job.project)
        if digest:
            body["archive"] = digest
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


def upload_workdir(transport: Transport, workdir: Path, project: str | None) -> str | None:
    """The digest of the directory's snapshot, known to the server afterwards; None for an empty directory."""
    snapshot = take_snapshot(workdir)
    if snapshot is None:
        return None
    path = path_of("archives", snapshot.digest)
    with snapshot.file as file:
        try:
            transport.call("GET", path)
        except NotFound:
            transport.call("PUT", path, params={"project": project}, file=file)
    return snapshot.digest
