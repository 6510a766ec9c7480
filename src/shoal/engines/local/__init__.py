"""This machine as a cluster of one node, or of many simulated ones, without root, daemons or containers.

`engine.LocalEngine.submit` checks a submission against `inventory`, completes its `task_specs` and stores
them in the spool through `spool_index`. `client` then starts a supervisor for each task: from a standby,
from the fork server or as a new process. `watcher` observes the tasks by their files and locks, stops and
reaps them, and `states` turns the files into observations.

The engine and the supervisors (`shoal.runtime`) share only the spool: a directory per attempt and node
whose files survive either side. What happens inside a job is not decided here.
"""

from shoal.engines.local.engine import LocalEngine
from shoal.engines.local.inventory import SimulatedNodes

__all__ = ["LocalEngine", "SimulatedNodes"]
