"""What agents say of keepers, and Ray of nodes, as glimpses. Pure.

Ray has no fence: a node it calls dead may only be cut off, with everything on it running. So no word of Ray's
ends a share. An agent's does, which has looked at the node's processes itself, and ended what was left.
"""

from __future__ import annotations

from typing import Any

from shoal.engines.glimpses import Glimpse, Stage


def glimpse(node: str, told: dict[str, Any]) -> Glimpse:
    """`told`: of one keeper, by the agent on its node."""
    pid, said = told["pid"], f"; it last said: {told['said']}" if told.get("said") else ""
    if told["state"] == "running":
        return Glimpse(stage=Stage.RUNNING, raw=f"its keeper is process {pid} on {node}{said}")
    if told["state"] == "over":
        return Glimpse(
            stage=Stage.ENDED, raw=f"its keeper, process {pid} on {node}, has ended{said}", is_over=True
        )
    if told["state"] == "hidden" and pid is None:
        return Glimpse(
            stage=Stage.UNKNOWN, raw=f"what {node} has of its keeper is not believed: {told['said']}"
        )
    if told["state"] == "hidden":
        return Glimpse(
            stage=Stage.UNKNOWN, raw=f"its keeper was started on {node} in a container that is gone{said}"
        )
    is_left = told["state"] == "left"
    what = "is gone, and something of its share does not die" if is_left else "is gone"
    return Glimpse(
        stage=Stage.UNKNOWN, raw=f"its keeper, process {pid} on {node}, {what}{said}", is_left=is_left
    )


def restarted(node: str) -> Glimpse:
    """Of a share that had begun before the machine was started: nothing outlives that."""
    return Glimpse(stage=Stage.ENDED, raw=f"{node} was restarted since", is_over=True)


def unseen(because: str, stranded: str = "") -> Glimpse:
    return Glimpse(stage=Stage.UNKNOWN, raw=because, stranded=stranded)
