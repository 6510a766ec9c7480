"""Files that stayed on submitters' machines."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Double, LargeBinary, Text

revision = "0008"
down_revision = "0007"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "left_behind",
        Column("digest", WORDS, primary_key=True),
        Column("used_at", Double, nullable=False),
        Column("body", LargeBinary, nullable=False),
    )
    op.create_index("left_behind_by_age", "left_behind", ["used_at"])
