"""The control plane: it decides what runs where, and records every decision before it acts.

A request of the API enters at `plane.py`, which calls one function of `commands/`. A command is one
transaction: it checks the caller's rights again, changes rows through `record.py` and appends an event. The
loops of `loops/` read what is recorded, decide, and record: `runner.py` runs them, `place.py` plans,
`launch.py` hands attempts to the engine, `watch.py` compares the engine with the records. `memory/` holds
what the loops may forget in a crash, `services/` keeps the replicas of services, and `core.py` is the one
object that all of them share. `opening.py` makes it from the settings: home, store, engine, first admin.

Only `control` joins scheduler, engines and store. Every loop may be killed at any instruction and started
again.
"""

from shoal.control.actor import Actor
from shoal.control.commands.renewals import StaleRenewal
from shoal.control.commands.submit import SubmitResult
from shoal.control.plane import ControlPlane

__all__ = ["Actor", "ControlPlane", "StaleRenewal", "SubmitResult"]
