"""Names of files that stayed on submitters' machines. The same list is kept once for each project.

Only for a sentence about a file that a job did not find: a list that is gone costs a hint and nothing else.
"""

from __future__ import annotations

import hashlib

import msgspec
from sqlalchemy import bindparam, delete, insert, select, update

from shoal.store.prepared import Session
from shoal.store.schema import left_behind
from shoal.wire import LeftBehind

INSERT = insert(left_behind)
GET = select(left_behind.c.body).where(left_behind.c.digest == bindparam("of"))
USED = update(left_behind).where(left_behind.c.digest == bindparam("of")).values(used_at=bindparam("at"))
_OLD = (
    select(left_behind.c.digest)
    .where(left_behind.c.used_at < bindparam("before"))
    .order_by(left_behind.c.used_at)
    .limit(bindparam("most"))
)
PURGE = delete(left_behind).where(left_behind.c.digest.in_(_OLD))


class LeftBehinds:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def put(self, project: str, told: LeftBehind, at: float) -> str:
        """Keep it, and return its name. The name is a project's own: nobody learns what others have."""
        body = msgspec.json.encode(told)
        digest = hashlib.sha256(project.encode() + b"\0" + body).hexdigest()
        if self._run(USED, {"of": digest, "at": at}).rowcount == 0:
            self._run(INSERT, {"digest": digest, "used_at": at, "body": body})
        return digest

    def get(self, digest: str) -> LeftBehind | None:
        body = self._session.value(GET, {"of": digest})
        return None if body is None else msgspec.json.decode(bytes(body), type=LeftBehind)

    def purge(self, before: float, most: int) -> int:
        """Forget at most `most` of those that no submission has named since, and return how many."""
        return self._run(PURGE, {"before": before, "most": most}).rowcount
