"""Ray: one agent actor on each node, which starts keepers as processes of their own.

Ray does two things here: it says which nodes there are, and it carries a few hundred bytes to one of them. It
places nothing (no placement groups), and nothing that runs depends on it: a keeper is no child of Ray's.
`client` speaks to `bridge`, a process of the Python that has Ray; `agent` is sent to the nodes by value.
These two stand on Python's library (and Ray) alone, as neither has to have Shoal.
"""

from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.engine import RayEngine

__all__ = ["RayConfig", "RayEngine"]
