"""The loops and the commands: load, decide, apply.

`control` alone joins scheduler, engines and store. Every change goes through `record`, in one
transaction; every loop may be killed at any instruction and started again.
"""

from shoal.control.actor import Actor
from shoal.control.plane import ControlPlane
from shoal.control.reports import StaleRenewal
from shoal.control.submit import SubmitResult

__all__ = ["Actor", "ControlPlane", "StaleRenewal", "SubmitResult"]
