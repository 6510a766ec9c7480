"""The elements of an array by number: how far a stop has come, and an index."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, text

revision = "0010"
down_revision = "0009"

IN_ARRAY = text("array_id IS NOT NULL")


def upgrade() -> None:
    op.add_column("array_work", Column("last_number", BigInteger, nullable=False, server_default=text("0")))
    op.drop_column("array_work", "last_id")
    op.create_index(
        "jobs_in_array",
        "jobs",
        ["array_id", "number"],
        sqlite_where=IN_ARRAY,
        postgresql_where=IN_ARRAY,
    )
