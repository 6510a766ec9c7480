"""The SDK's front door: one object, one server, blocking calls.

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
from shoal.client.submission import body_of, spec_of
from shoal.client.transport import path_of
from shoal.errors import SpecError
from shoal.spec import JobSpec


class Shoal(Connection):
    """A connection that can also submit."""

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

        A relative `workdir` starts at `base`: by default the job file's directory, else the current one.
        Returns once the server has it durably. Repeating with the same `key` gives the same job.
        """
        job, start = spec_of(spec, fields)
        if job.array is not None:
            raise SpecError("this is an array of jobs", hint="call `submit_array` instead of `submit`")
        answer = self._submit(job, base or start, key)
        return JobHandle(self, answer["jobs"][0], was_repeated=bool(answer.get("was_repeated")))

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
        answer = self._submit(job, base or start, key)
        jobs = [JobHandle(self, element) for element in answer["jobs"]]
        return ArrayHandle(self, str(answer["array_id"]), int(answer["count"]), jobs)

    def _submit(self, job: JobSpec, base: Path, key: str | None) -> dict[str, Any]:
        body = body_of(self.transport, job, base, self.env)
        return dict(self.transport.call("POST", path_of("jobs"), json_body=body, key=key))
