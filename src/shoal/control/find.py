"""From what people type to the job they mean."""

from __future__ import annotations

from collections.abc import Collection

from shoal.model.job import Job
from shoal.store import Tx


def find_job(
    tx: Tx, reference: str, projects: Collection[str] | None, default_project: str | None
) -> Job | None:
    """`job_...`, `vision/17`, `17` or a name (its newest), among `projects` (None: all of them)."""
    job = _find(tx, reference, default_project)
    if job is None or (projects is not None and job.project not in projects):
        return None
    return job


def _find(tx: Tx, reference: str, default_project: str | None) -> Job | None:
    if reference.startswith("job_"):
        return tx.jobs.get(reference)
    project, slash, rest = reference.rpartition("/")
    where = project if slash else default_project
    if where is None:
        return None
    if rest.isascii() and rest.isdigit() and len(rest) < 19:
        return tx.jobs.by_number(where, int(rest))
    return tx.jobs.newest_named(where, rest)
