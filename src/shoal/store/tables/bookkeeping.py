"""Small facts about this installation, as text by name, and counters that only grow.

Daily counters: how often something was done today, by subject. One row each, which begins again every day
(UTC).

Idempotency keys: the first reply to a request, kept so that a repeated request changes nothing.
"""

from __future__ import annotations

from sqlalchemy import bindparam, case, delete, insert, select, tuple_, update

from shoal.store.base import KeyReused
from shoal.store.schema import daily_counts, idempotency_keys, meta
from shoal.store.session import Session

INSERT_META = insert(meta)
GET_META = select(meta.c.value).where(meta.c.key == bindparam("named"))
SET_META = update(meta).where(meta.c.key == bindparam("named")).values(value=bindparam("to_value"))


class MetaTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def get(self, key: str) -> str | None:
        value: str | None = self._session.value(GET_META, {"named": key})
        return value

    def set(self, key: str, value: str) -> None:
        """Add, or replace."""
        if self._run(SET_META, {"named": key, "to_value": value}).rowcount == 0:
            self._run(INSERT_META, {"key": key, "value": value})

    def take(self, key: str, first: int) -> int:
        """The next value of a counter that begins at `first` and never repeats a value."""
        value = int(self.get(key) or first)
        self.set(key, str(value + 1))
        return value


DAY_S = 86_400

_THIS_COUNT = daily_counts.c.subject == bindparam("of")
ADD_COUNT = (
    update(daily_counts)
    .where(_THIS_COUNT)
    .values(
        count=bindparam("more")
        + case((daily_counts.c.day == bindparam("today"), daily_counts.c.count), else_=0),
        day=bindparam("today"),
    )
    .returning(daily_counts.c.count)
)
INSERT_COUNT = insert(daily_counts)
GET_COUNT = select(daily_counts.c.count).where(_THIS_COUNT, daily_counts.c.day == bindparam("today"))
PURGE_COUNTS = delete(daily_counts).where(daily_counts.c.day < bindparam("today"))


def day_of(now: float) -> int:
    return int(now // DAY_S)


class DailyCountTable:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, subject: str, more: int, now: float) -> int:
        """Count `more` and return today's total, these included."""
        row = self._run(ADD_COUNT, {"of": subject, "more": more, "today": day_of(now)}).fetchone()
        if row is not None:
            return int(row[0])
        self._run(INSERT_COUNT, {"subject": subject, "day": day_of(now), "count": more})
        return more

    def get(self, subject: str, now: float) -> int:
        return int(self._session.value(GET_COUNT, {"of": subject, "today": day_of(now)}) or 0)

    def purge(self, now: float) -> None:
        """Forget earlier days."""
        self._run(PURGE_COUNTS, {"today": day_of(now)})


INSERT_KEY = insert(idempotency_keys)
GET_KEY = select(idempotency_keys.c.fingerprint, idempotency_keys.c.answer).where(
    idempotency_keys.c.actor == bindparam("by"), idempotency_keys.c.key == bindparam("named")
)
_OLD_KEYS = (
    select(idempotency_keys.c.actor, idempotency_keys.c.key)
    .where(idempotency_keys.c.at < bindparam("before"))
    .order_by(idempotency_keys.c.at)
    .limit(bindparam("most"))
)
PURGE_KEYS = delete(idempotency_keys).where(
    tuple_(idempotency_keys.c.actor, idempotency_keys.c.key).in_(_OLD_KEYS)
)


class IdempotencyKeyTable:
    def __init__(self, session: Session) -> None:
        self._run = session.run

    def recall(self, actor: str, key: str, fingerprint: str) -> bytes | None:
        """The reply given to the same request before. `KeyReused` if the key was for another request."""
        row = self._run(GET_KEY, {"by": actor, "named": key}).fetchone()
        if row is None:
            return None
        if row[0] != fingerprint:
            raise KeyReused(
                f"the idempotency key `{key}` was used before for a different request",
                hint="send a new key with a new request, or the first request unchanged",
            )
        return bytes(row[1])

    def remember(self, actor: str, key: str, fingerprint: str, answer: bytes, at: float) -> None:
        """Keep the reply. Call it in the transaction that did what the request asked."""
        row = {"actor": actor, "key": key, "fingerprint": fingerprint, "answer": answer, "at": at}
        self._run(INSERT_KEY, row)

    def purge(self, before: float, most: int) -> int:
        """Forget at most `most` of the oldest replies before that time. Return how many."""
        return self._run(PURGE_KEYS, {"before": before, "most": most}).rowcount
