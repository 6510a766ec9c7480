"""Sealed secrets of jobs. They are encrypted before they come here; the store never sees one open."""

from __future__ import annotations

from sqlalchemy import bindparam, delete, insert, select

from shoal.store.prepared import Session
from shoal.store.schema import secrets

INSERT = insert(secrets)
GET = select(secrets.c.sealed).where(secrets.c.job_id == bindparam("of"))
DROP = delete(secrets).where(secrets.c.job_id == bindparam("of"))


class Secrets:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, job_id: str, sealed: bytes) -> None:
        """Add, or replace."""
        self.drop(job_id)
        self._run(INSERT, {"job_id": job_id, "sealed": sealed})

    def get(self, job_id: str) -> bytes | None:
        sealed = self._session.value(GET, {"of": job_id})
        return None if sealed is None else bytes(sealed)

    def drop(self, job_id: str) -> None:
        """May be repeated."""
        self._run(DROP, {"of": job_id})
