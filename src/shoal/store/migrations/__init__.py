"""Bring a database's tables to this version, from whichever older version it is.

Migrations are Alembic's and are never edited once released; they do not import the rest of the store.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from shoal.errors import StateError


def migrate(connection: Connection) -> None:
    """Upgrade to the newest revision inside the caller's transaction. May be repeated.

    `StateError`: the database was written by a newer Shoal.
    """
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current == script.get_current_head():
        return
    if current is not None and current not in {known.revision for known in script.walk_revisions()}:
        raise StateError(
            f"this database was written by a newer Shoal (its revision is {current})",
            hint="pip install --upgrade shoal",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
