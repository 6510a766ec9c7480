"""Which database a URL names."""

from __future__ import annotations

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from shoal.errors import StateError


def parse_url(url: str) -> URL:
    """`StateError` for what is no database's."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise unknown(url.partition(":")[0]) from None
    return _with_psycopg(parsed) if parsed.get_backend_name() == "postgresql" else parsed


def _with_psycopg(url: URL) -> URL:
    return url.set(drivername="postgresql+psycopg")


def unknown(kind: str) -> StateError:
    """Names the kind alone: the rest of a URL may hold a password."""
    return StateError(
        f"cannot keep state in a `{kind}` database without a path or server",
        hint="use sqlite:////path/to/shoal.db or postgresql+psycopg://user@host/name",
    )
