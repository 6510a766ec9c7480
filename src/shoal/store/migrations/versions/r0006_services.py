"""Services, their releases and replicas."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Text

revision = "0006"
down_revision = "0005"

WORDS = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "services",
        Column("service_id", WORDS, primary_key=True),
        Column("project", WORDS, nullable=False),
        Column("name", WORDS, nullable=False),
        Column("version", BigInteger, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_index("services_by_name", "services", ["project", "name"], unique=True)
    op.create_table(
        "releases",
        Column("service_id", WORDS, primary_key=True),
        Column("number", BigInteger, primary_key=True),
        Column("body", WORDS, nullable=False),
    )
    op.create_table(
        "replicas",
        Column("job_id", WORDS, primary_key=True),
        Column("service_id", WORDS, nullable=False),
        Column("body", WORDS, nullable=False),
    )
    op.create_index("replicas_by_service", "replicas", ["service_id"])
