"""Idempotency keys: what was answered the first time, kept so that a repeated request changes nothing."""

from __future__ import annotations

from sqlalchemy import bindparam, delete, insert, select, tuple_

from shoal.store.base import KeyReused
from shoal.store.prepared import Session
from shoal.store.schema import idempotency_keys

INSERT = insert(idempotency_keys)
RECALL = select(idempotency_keys.c.fingerprint, idempotency_keys.c.answer).where(
    idempotency_keys.c.actor == bindparam("by"), idempotency_keys.c.key == bindparam("named")
)
_OLD = (
    select(idempotency_keys.c.actor, idempotency_keys.c.key)
    .where(idempotency_keys.c.at < bindparam("before"))
    .order_by(idempotency_keys.c.at)
    .limit(bindparam("most"))
)
PURGE = delete(idempotency_keys).where(tuple_(idempotency_keys.c.actor, idempotency_keys.c.key).in_(_OLD))


class Keys:
    def __init__(self, session: Session) -> None:
        self._run = session.run

    def recall(self, actor: str, key: str, fingerprint: str) -> bytes | None:
        """The answer given to this very request before; `KeyReused` if the key was for another."""
        found = self._run(RECALL, {"by": actor, "named": key}).fetchone()
        if found is None:
            return None
        if found[0] != fingerprint:
            raise KeyReused(
                f"the idempotency key `{key}` was used before for a different request",
                hint="send a new key with a new request, or the first request unchanged",
            )
        return bytes(found[1])

    def remember(self, actor: str, key: str, fingerprint: str, answer: bytes, at: float) -> None:
        """Keep the answer; call it in the transaction that did what the request asked."""
        row = {"actor": actor, "key": key, "fingerprint": fingerprint, "answer": answer, "at": at}
        self._run(INSERT, row)

    def purge(self, before: float, most: int) -> int:
        """Forget the oldest of the answers before that, at most so many; returns how many."""
        return self._run(PURGE, {"before": before, "most": most}).rowcount
