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
from shoal.store.left_behind import LeftBehinds
from shoal.store.meta import Meta
from shoal.store.metrics import Metrics
from shoal.store.nodes import Nodes
from shoal.store.people import People
from shoal.store.people_changes import PeopleChanges
from shoal.store.prepared import Session
from shoal.store.secrets import Secrets
from shoal.store.services import Services
from shoal.store.submissions import Submissions
from shoal.store.tokens import Tokens
from shoal.store.windows import Windows


class Tx:
    """Good for one transaction on one thread; using it afterwards is a mistake."""

    def __init__(self, connection: Connection, chain_key: bytes = b"") -> None:
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
        self.events = Events(session, chain_key)
        self.keys = Keys(session)
        self.people_changes = changes = PeopleChanges()
        """Of people and tokens, until an event takes them along."""
        self.people = People(session, changes)
        self.tokens = Tokens(session, self.people, changes)
        self.secrets = Secrets(session)
        self.left_behind = LeftBehinds(session)
        self.metrics = Metrics(session)
        self.meta = Meta(session)

    def rewind(self, head: Head) -> None:
        """Forget what was done after `head`: the writer calls this when it undoes a change."""
        self.events.rewind(head)
        self.people_changes.take()
        self.jobs.forget()
        self.attempts.forget()
