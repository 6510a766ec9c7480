"""The SDK's main class: one object for one server, with blocking calls.

shoal = Shoal()
job = shoal.submit(run="python train.py", resources={"gpus": 8})
for line in job.logs(follow=True):
    print(line["text"])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.client.connection import Connection
from shoal.client.handles import ArrayHandle, JobHandle
from shoal.client.resources import JsonObject
from shoal.errors import SpecError
from shoal.spec import JobSpec, parse_job
from shoal.spec.files import load_job, load_service
from shoal.spec.parse import parse_service
from shoal.spec.service import ServiceSpec


class Shoal(Connection):
    """A connection that also reads specs."""

    def submit(
        self,
        spec: JobSpec | str | Path | None = None,
        /,
        *,
        base: Path | None = None,
        key: str | None = None,
        **fields: Any,
    ) -> JobHandle:
        """Submit one job: a `JobSpec`, the path of a job file, or the fields of one.

        A relative `workdir` starts at `base`, by default the job file's directory or else the current one.
        Returns once the server has stored the job durably. Repeating with the same `key` gives the same job.
        """
        job, start = spec_of(spec, fields)
        if job.array is not None:
            raise SpecError("this is an array of jobs", hint="call `submit_array` instead of `submit`")
        submitted = self.submit_spec(job, base or start, key=key)
        assert isinstance(submitted, JobHandle)
        return submitted

    def submit_array(
        self,
        spec: JobSpec | str | Path | None = None,
        /,
        *,
        base: Path | None = None,
        key: str | None = None,
        **fields: Any,
    ) -> ArrayHandle:
        """Submit a job with `array`, as `submit` does."""
        job, start = spec_of(spec, fields)
        if job.array is None:
            raise SpecError("this job has no `array`", hint="call `submit` instead of `submit_array`")
        submitted = self.submit_spec(job, base or start, key=key)
        assert isinstance(submitted, ArrayHandle)
        return submitted

    def serve(
        self, spec: ServiceSpec | str | Path | None = None, /, *, key: str | None = None, **fields: Any
    ) -> JsonObject:
        """Run a service or a new release of it: a `ServiceSpec`, the path of a service file, or its fields.
        Fields given together with a spec or a file replace those in it.

        Returns once the server has stored it durably; `services.show` reports the progress.
        """
        base = Path(spec).absolute().parent if isinstance(spec, str | Path) else Path.cwd()
        if isinstance(spec, str | Path):
            spec = load_service(spec)
        service = spec
        if service is None or fields:
            service = parse_service({**(service.canonical() if service else {}), **fields}, source="serve")
        workdir = base / service.workdir if service.workdir else None
        return self.services.serve(
            service.canonical(), workdir=workdir, env=self.env, key=key, progress=self.on_progress
        )

    def submit_spec(self, job: JobSpec, base: Path, *, key: str | None = None) -> JobHandle | ArrayHandle:
        """Submit a parsed spec, a job or an array. A relative `workdir` starts at `base`."""
        workdir = base / job.workdir if job.workdir else None
        return self.send({"spec": job.canonical()}, workdir=workdir, secrets=job.secrets, key=key)


def spec_of(spec: JobSpec | str | Path | None, fields: dict[str, Any]) -> tuple[JobSpec, Path]:
    """Return the job, and where a relative `workdir` starts: the job file's directory, else the
    current one.
    """
    if spec is not None and fields:
        raise SpecError("give a spec or fields, not both", hint="`submit(spec)` or `submit(run=..., ...)`")
    if isinstance(spec, str | Path):
        return load_job(spec), Path(spec).absolute().parent
    return spec if spec is not None else parse_job(fields, source="submit"), Path.cwd()
