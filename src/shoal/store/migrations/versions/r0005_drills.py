"""An index of drill events, which are few among many, so that finding them does not walk over the others."""

from __future__ import annotations

from alembic import op
from sqlalchemy import text

revision = "0005"
down_revision = "0004"

OF_DRILLS = "substr(kind, 1, 6) = 'drill.'"


def upgrade() -> None:
    where = text(OF_DRILLS)
    op.create_index("events_of_drills", "events", ["seq"], sqlite_where=where, postgresql_where=where)
