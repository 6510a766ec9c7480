"""Maintenance windows and reservations."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Double, Text

revision = "0002"
down_revision = "0001"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "windows",
        Column("window_id", WORDS, primary_key=True),
        Column("from_at", Double, nullable=False),
        Column("until_at", Double, nullable=False),
        Column("body", WORDS, nullable=False),
    )
