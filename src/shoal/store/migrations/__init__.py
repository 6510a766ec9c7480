"""Bring a database's tables from any older version to this one.

`migrate` runs Alembic's revisions in `versions/`, in order, inside the caller's transaction. A revision is
never edited once released, and imports nothing else of the store.
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
    if current is not None and current not in {
        script_revision.revision for script_revision in script.walk_revisions()
    }:
        raise StateError(
            f"this database was written by a newer Shoal (its revision is {current})",
            hint="pip install --upgrade shoal",
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
