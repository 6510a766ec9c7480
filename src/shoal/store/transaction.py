"""What a change or a question sees of the store: one repository for each noun."""

from __future__ import annotations

from sqlalchemy import Connection

from shoal.store.array_work import ArrayWork
from shoal.store.attempts import Attempts
from shoal.store.base import Head
from shoal.store.daily_counts import DailyCounts
from shoal.store.events import Events
from shoal.store.jobs import Jobs
from shoal.store.keys import Keys
from shoal.store.meta import Meta
from shoal.store.metrics import Metrics
from shoal.store.nodes import Nodes
from shoal.store.people import People
from shoal.store.prepared import Session
from shoal.store.secrets import Secrets
from shoal.store.services import Services
from shoal.store.submissions import Submissions
from shoal.store.windows import Windows


class Tx:
    """Good for one transaction on one thread; using it afterwards is a mistake."""

    def __init__(self, connection: Connection) -> None:
        self.session = session = Session(connection)
        """For the store itself, and for tests that reach below the repositories."""
        self.jobs = Jobs(session)
        self.attempts = Attempts(session)
        self.submissions = Submissions(session)
        self.array_work = ArrayWork(session)
        self.daily_counts = DailyCounts(session)
        self.nodes = Nodes(session)
        self.services = Services(session)
        self.windows = Windows(session)
        self.events = Events(session)
        self.keys = Keys(session)
        self.people = People(session)
        self.secrets = Secrets(session)
        self.metrics = Metrics(session)
        self.meta = Meta(session)

    def rewind(self, head: Head) -> None:
        """Forget what was done after `head`: the writer calls this when it undoes a change."""
        self.events.rewind(head)
        self.jobs.forget()
        self.attempts.forget()
