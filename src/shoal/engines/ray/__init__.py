"""Ray: one agent actor on each node, which starts node agents as processes of their own.

`engine.RayEngine` launches a task by `render.agent_task`, which `client` sends as a line of JSON to
`bridge`, a process of the Python that has Ray. The bridge calls the actor of `agent` on the node, and
`agent` starts the node agent. Replies come back the same way, and `parse` turns them into nodes and
observations. `head` starts Shoal's own Ray if none is configured; `probe` checks another one first;
`config` is what `shoal connect ray` wrote.

Ray does two things here: it says which nodes exist, and it carries a few hundred bytes to one of them. It
places nothing (no placement groups), and no running job depends on it: a node agent is no child of Ray.
`bridge` and `agent` use only Python's library (and Ray), because neither needs Shoal.
"""

from shoal.engines.ray.config import RayConfig
from shoal.engines.ray.engine import RayEngine

__all__ = ["RayConfig", "RayEngine"]
