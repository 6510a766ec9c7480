"""What agents say of keepers, and Ray of nodes, as glimpses. Pure.

Ray has no fence: a node it calls dead may only be cut off, with everything on it running. So no word of Ray's
ends a share. An agent's does, which has looked at the node's processes itself, and ended what was left.
"""

from __future__ import annotations

from typing import Any

from shoal.engines.glimpses import Glimpse, Stage


def is_about(told: dict[str, Any], holder: str) -> bool:
    """Whether an agent tells of the very process that has the order. It may know another keeper that asked
    for it in vain: one that was started on another machine of the same name.
    """
    return bool(holder) and told.get("process") == holder


def glimpse(node: str, told: dict[str, Any], holder: str) -> Glimpse:
    """`told`: of one keeper, by the agent on its node. `holder`: the process that has the order; empty:
    nobody has. That another one is over is no evidence. Whose a record of an older Shoal is, is not known: it
    ends nothing, and what is left of it holds off a fence.
    """
    pid, said = told["pid"], f"; it last said: {told['said']}" if told.get("said") else ""
    is_its = is_about(told, holder)
    may_be_its = is_its or not told.get("process")
    whose = "its keeper" if may_be_its or not holder else "a keeper that did not get its order"
    if told["state"] == "running":
        return Glimpse(stage=Stage.RUNNING, raw=f"{whose} is process {pid} on {node}{said}")
    if told["state"] == "over":
        raw = f"{whose}, process {pid} on {node}, has ended{said}"
        return Glimpse(stage=Stage.ENDED, raw=raw, is_over=is_its)
    if told["state"] == "hidden" and pid is None:
        return Glimpse(
            stage=Stage.UNKNOWN, raw=f"what {node} has of its keeper is not believed: {told['said']}"
        )
    if told["state"] == "hidden":
        return Glimpse(
            stage=Stage.UNKNOWN, raw=f"{whose} was started on {node} in a container that is gone{said}"
        )
    is_left = told["state"] == "left"
    what = "is gone, and something of its share does not die" if is_left else "is gone"
    raw = f"{whose}, process {pid} on {node}, {what}{said}"
    return Glimpse(stage=Stage.UNKNOWN, raw=raw, is_left=is_left and may_be_its)


def restarted(node: str) -> Glimpse:
    """Of a share that had begun before the machine was started: nothing outlives that."""
    return Glimpse(stage=Stage.ENDED, raw=f"{node} was restarted since", is_over=True)


def unseen(because: str, stranded: str = "") -> Glimpse:
    return Glimpse(stage=Stage.UNKNOWN, raw=because, stranded=stranded)
