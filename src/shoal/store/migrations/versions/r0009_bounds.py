"""Array operations that span several transactions, and daily counters that limit them."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Text

revision = "0009"
down_revision = "0008"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "array_work",
        Column("array_id", WORDS, primary_key=True),
        Column("verb", WORDS, primary_key=True),
        Column("actor", WORDS, nullable=False),
        Column("last_id", WORDS, nullable=False),
    )
    op.create_table(
        "daily_counts",
        Column("subject", WORDS, primary_key=True),
        Column("day", BigInteger, nullable=False),
        Column("count", BigInteger, nullable=False),
    )
