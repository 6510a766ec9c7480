"""This cluster's own past, read from its control plane, for commands that simulate it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.cli.flags import connect
from shoal.errors import SpecError

if TYPE_CHECKING:
    from shoal.sim.history.facts import Fact
    from shoal.sim.history.workload import Past


def read_past() -> tuple[list[tuple[int, Fact]], Past]:
    """The whole log as facts and as a workload. Needs a role for all projects."""
    from shoal.cli.decision import whole_log
    from shoal.sim.history.facts import facts_of
    from shoal.sim.history.workload import past_of

    with connect() as shoal:
        facts = list(facts_of(whole_log(shoal)))
    past = past_of(facts)
    if not past.workload.jobs:
        raise SpecError("this cluster has run nothing yet: there is no past", hint="name a trace to simulate")
    return facts, past
