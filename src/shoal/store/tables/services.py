"""Services, their releases and replicas. A replica's row is removed when its job has ended; its events
remain.
"""

from __future__ import annotations

from sqlalchemy import bindparam, delete, insert, select, update

from shoal.errors import StateError
from shoal.model.attempt import Attempt
from shoal.model.job import Job
from shoal.model.service import Release, Replica, Service
from shoal.store.base import StaleRecord
from shoal.store.schema import attempts, jobs, releases, replicas, services
from shoal.store.session import (
    Session,
    decode_attempt,
    decode_job,
    decode_release,
    decode_replica,
    decode_service,
    encode,
)

INSERT = insert(services)
BY_ID = select(services.c.body).where(services.c.service_id == bindparam("of"))
BY_NAME = select(services.c.body).where(
    services.c.project == bindparam("project"), services.c.name == bindparam("name")
)
ALL = select(services.c.body).order_by(services.c.project, services.c.name)
UPDATE = (
    update(services)
    .where(services.c.service_id == bindparam("of"), services.c.version == bindparam("seen"))
    .values(version=bindparam("to_version"), body=bindparam("to_body"))
)
REMOVE = delete(services).where(services.c.service_id == bindparam("of"))
ADD_RELEASE = insert(releases)
RELEASE = select(releases.c.body).where(
    releases.c.service_id == bindparam("of"), releases.c.number == bindparam("number")
)
RELEASES = select(releases.c.body).where(releases.c.service_id == bindparam("of")).order_by(releases.c.number)
REMOVE_RELEASES = delete(releases).where(releases.c.service_id == bindparam("of"))
ADD_REPLICA = insert(replicas)
REPLICA = select(replicas.c.body).where(replicas.c.job_id == bindparam("id"))
SET_REPLICA = update(replicas).where(replicas.c.job_id == bindparam("id")).values(body=bindparam("to_body"))
DROP_REPLICA = delete(replicas).where(replicas.c.job_id == bindparam("id"))
REPLICAS = (
    select(replicas.c.body, jobs.c.body.label("job_body"), attempts.c.body.label("attempt_body"))
    .join_from(replicas, jobs, jobs.c.job_id == replicas.c.job_id)
    .join(attempts, attempts.c.attempt_id == jobs.c.newest_attempt_id)
    .where(replicas.c.service_id == bindparam("of"))
    .order_by(replicas.c.job_id)
)


class ServiceTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, service: Service) -> None:
        """`StateError` if the project has a service of that name."""
        if self.by_name(service.project, service.name) is not None:
            raise StateError(f"there is already a service `{service.reference}`", hint="shoal services")
        row = {"service_id": service.service_id, "project": service.project, "name": service.name}
        self._run(INSERT, {**row, "version": service.version, "body": encode(service)})

    def get(self, service_id: str) -> Service | None:
        body = self._session.value(BY_ID, {"of": service_id})
        return None if body is None else decode_service(body)

    def by_name(self, project: str, name: str) -> Service | None:
        body = self._session.value(BY_NAME, {"project": project, "name": name})
        return None if body is None else decode_service(body)

    def all(self) -> list[Service]:
        """By project, then name."""
        return [decode_service(body) for (body,) in self._run(ALL)]

    def update(self, service: Service) -> None:
        """Replace the record whose version is one less. `StaleRecord` if there is no such record."""
        seen = {"of": service.service_id, "seen": service.version - 1}
        changes = {"to_version": service.version, "to_body": encode(service)}
        if self._run(UPDATE, seen | changes).rowcount == 0:
            raise StaleRecord(f"service {service.reference} is no longer at version {service.version - 1}")

    def remove(self, service_id: str) -> None:
        """Remove the service with its releases. May be repeated. Its replicas must be removed before."""
        self._run(REMOVE_RELEASES, {"of": service_id})
        self._run(REMOVE, {"of": service_id})

    def add_release(self, release: Release) -> None:
        row = {"service_id": release.service_id, "number": release.number}
        self._run(ADD_RELEASE, {**row, "body": encode(release)})

    def release(self, service_id: str, number: int) -> Release | None:
        body = self._session.value(RELEASE, {"of": service_id, "number": number})
        return None if body is None else decode_release(body)

    def releases(self, service_id: str) -> list[Release]:
        """The releases in order."""
        return [decode_release(body) for (body,) in self._run(RELEASES, {"of": service_id})]

    def add_replica(self, replica: Replica) -> None:
        """Its job is added beside it."""
        row = {"job_id": replica.replica_id, "service_id": replica.service_id}
        self._run(ADD_REPLICA, {**row, "body": encode(replica)})

    def replica(self, replica_id: str) -> Replica | None:
        body = self._session.value(REPLICA, {"id": replica_id})
        return None if body is None else decode_replica(body)

    def set_replica(self, replica: Replica) -> None:
        """Replace the replica's record. A removed replica stays removed."""
        self._run(SET_REPLICA, {"id": replica.replica_id, "to_body": encode(replica)})

    def drop_replica(self, replica_id: str) -> None:
        """May be repeated."""
        self._run(DROP_REPLICA, {"id": replica_id})

    def replicas(self, service_id: str) -> list[tuple[Replica, Job, Attempt]]:
        """Each replica with its job and the job's newest attempt, oldest first. Some jobs may have ended."""
        return [
            (decode_replica(replica), decode_job(job), decode_attempt(attempt))
            for replica, job, attempt in self._run(REPLICAS, {"of": service_id})
        ]
