"""The name that a job has in Slurm's queue, as tests find it there."""

from __future__ import annotations

from shoal.client.handles import JobHandle
from shoal.engines.slurm.render import job_name
from tests.support.shares import an_order


def slurm_name(job: JobHandle, attempt_id: str, incarnation: int = 0) -> str:
    data = job.refresh().data
    order = an_order(
        attempt_id=attempt_id, job_name=data["name"], project=data["project"], job_number=data["number"]
    )
    return job_name(order, incarnation)
