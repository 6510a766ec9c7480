"""What a change or a question sees of the store: one repository for each noun."""

from __future__ import annotations

from sqlalchemy import Connection

from shoal.store.attempts import Attempts
from shoal.store.events import Events
from shoal.store.jobs import Jobs
from shoal.store.keys import Keys
from shoal.store.meta import Meta
from shoal.store.nodes import Nodes
from shoal.store.people import People
from shoal.store.secrets import Secrets


class Tx:
    """Good for one transaction on one thread; using it afterwards is a mistake."""

    def __init__(self, connection: Connection) -> None:
        self.jobs = Jobs(connection)
        self.attempts = Attempts(connection)
        self.nodes = Nodes(connection)
        self.events = Events(connection)
        self.keys = Keys(connection)
        self.people = People(connection)
        self.secrets = Secrets(connection)
        self.meta = Meta(connection)
