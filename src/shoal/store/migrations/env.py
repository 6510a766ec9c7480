"""Run by Alembic: migrate on the connection, and in the transaction, that `migrate` passed in."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
