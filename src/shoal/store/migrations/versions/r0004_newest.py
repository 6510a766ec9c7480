"""The newest value of a curve. After a restart it is not the value with the highest step."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Double

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("metric_series", Column("newest_x", BigInteger))
    op.add_column("metric_series", Column("newest", Double))
