"""This machine as a cluster of one node, or of many simulated ones, without root, daemons or containers.

The engine starts supervisors (`shoal.runtime`) and leaves them alone: all they share is the spool, a
directory per attempt and node whose files survive either side. What happens inside a job is not decided here.
"""

from shoal.engines.local.engine import LocalEngine
from shoal.engines.local.simulated import SimulatedNodes

__all__ = ["LocalEngine", "SimulatedNodes"]
