"""How often something was done today, by subject: one row each, which begins again every day (UTC)."""

from __future__ import annotations

from sqlalchemy import bindparam, case, delete, insert, select, update

from shoal.store.prepared import Session
from shoal.store.schema import daily_counts

DAY_S = 86_400

_THIS = daily_counts.c.subject == bindparam("of")
ADD = (
    update(daily_counts)
    .where(_THIS)
    .values(
        count=bindparam("more")
        + case((daily_counts.c.day == bindparam("today"), daily_counts.c.count), else_=0),
        day=bindparam("today"),
    )
    .returning(daily_counts.c.count)
)
INSERT = insert(daily_counts)
GET = select(daily_counts.c.count).where(_THIS, daily_counts.c.day == bindparam("today"))
PURGE = delete(daily_counts).where(daily_counts.c.day < bindparam("today"))


def day_of(now: float) -> int:
    return int(now // DAY_S)


class DailyCounts:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._run = session.run

    def add(self, subject: str, more: int, now: float) -> int:
        """Count `more` and return how many it are today, these included."""
        row = self._run(ADD, {"of": subject, "more": more, "today": day_of(now)}).fetchone()
        if row is not None:
            return int(row[0])
        self._run(INSERT, {"subject": subject, "day": day_of(now), "count": more})
        return more

    def get(self, subject: str, now: float) -> int:
        return int(self._session.value(GET, {"of": subject, "today": day_of(now)}) or 0)

    def purge(self, now: float) -> None:
        """Forget the days before."""
        self._run(PURGE, {"today": day_of(now)})
