"""Metrics that jobs report while they run."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double, Text

revision = "0003"
down_revision = "0002"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "metric_series",
        Column("job_id", WORDS, primary_key=True),
        Column("name", WORDS, primary_key=True),
        Column("node", WORDS, primary_key=True),
        Column("axis", WORDS, primary_key=True),
        Column("epoch", BigInteger, nullable=False),
        Column("rank", BigInteger, nullable=False),
        Column("stride", BigInteger, nullable=False),
        Column("num_points", BigInteger, nullable=False),
        Column("heard_at", Double, nullable=False),
    )
    op.create_table(
        "metric_points",
        Column("job_id", WORDS, primary_key=True),
        Column("name", WORDS, primary_key=True),
        Column("node", WORDS, primary_key=True),
        Column("axis", WORDS, primary_key=True),
        Column("stretch", BigInteger, primary_key=True),
        Column("x", BigInteger, nullable=False),
        Column("last", Double),
        Column("low", Double),
        Column("high", Double),
    )
