"""The control plane: it decides what runs where, and records every decision before it acts.

A route of the API calls one function of `commands/`. A command is one transaction: it checks the caller's
rights again, changes rows through `record.py` and appends an event. The loops of `loops/` read what is
recorded, decide, and record: `runner.py` runs them, `place.py` plans, `launch.py` hands attempts to the
engine, `watch.py` compares the engine with the records. `memory/` holds what the loops may forget in a crash,
and `services/` keeps the replicas of services. Each function takes the few capabilities that it uses
(`capabilities.py`). `core.py` builds them, and `opening.py` opens them from the settings: home, store,
engine, first admin.

Only `control` joins scheduler, engines and store. Every loop may be killed at any instruction and started
again.
"""

from shoal.control.actor import Actor
from shoal.control.commands.renewals import StaleRenewal
from shoal.control.commands.submit import SubmitResult
from shoal.control.core import Core

__all__ = ["Actor", "Core", "StaleRenewal", "SubmitResult"]
