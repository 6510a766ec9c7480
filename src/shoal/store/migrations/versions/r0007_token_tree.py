"""The token that a token was made with, and the one service that it opens."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Text

revision = "0007"
down_revision = "0006"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.add_column("tokens", Column("parent", WORDS))
    op.add_column("tokens", Column("service", WORDS))
    op.create_index("tokens_by_parent", "tokens", ["parent"])
    op.create_index("tokens_by_service", "tokens", ["service"])
