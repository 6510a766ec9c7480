"""An index of the ends of attempts. The recent use of each project is read from them alone."""

from __future__ import annotations

from alembic import op
from sqlalchemy import text

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    where = text("kind = 'attempt.ended'")
    op.create_index("events_of_ends", "events", ["seq"], sqlite_where=where, postgresql_where=where)
