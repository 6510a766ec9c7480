"""`shoal nodes`, `drain`, `resume`: list nodes, show how jobs are confined, and open or close nodes."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.flags import Because, JsonFlag, connect
from shoal.cli.output import note, print_json, print_table
from shoal.cli.text import number, one_line, size, unanswered_engine_text

app = App(name="nodes", help="List nodes; cordon, drain, resume, remove or declare them dead.")
HEADS = ("NODE", "POOL", "STATE", "GPUS", "CPUS", "MEMORY", "CONFINEMENT")
NodeName = Annotated[str, Parameter(help="The node, as `shoal nodes` lists it.")]


@app.default
def nodes(
    name: Annotated[str | None, Parameter(help="Show only this node.")] = None, *, json: JsonFlag = False
) -> int:
    """List nodes with what is in use and how their jobs are confined."""
    with connect() as shoal:
        listed = [shoal.node(name)] if name else shoal.nodes()
    if json:
        print_json(listed[0] if name else listed)
    elif name:
        print("\n".join(describe(listed[0])))
    elif not listed:
        print("no nodes; `shoal doctor` says what this machine could offer")
    else:
        rows = [row(node) for node in listed]
        # Slurm and Ray do not report it: leave out a column without values.
        heads = HEADS if any(cells[-1] != "unknown" for cells in rows) else HEADS[:-1]
        print_table(heads, (cells[: len(heads)] for cells in rows), elastic=heads[-1])
    if not json:
        for text in filter(None, (stale_nodes_text(listed), silent_jobs_text(listed))):
            note(f"-- {text}")
    return 0


def stale_nodes_text(nodes: list[dict[str, Any]]) -> str:
    """Say that what is shown of these nodes is old; "" if their cluster answers."""
    away = next((node for node in nodes if node.get("unanswered")), None)
    return unanswered_engine_text(away["engine"], away["unanswered"]) if away else ""


def silent_jobs_text(nodes: list[dict[str, Any]]) -> str:
    """Name the nodes whose jobs are silent although the cluster reports no problem with the node; "" if there
    are none. A cluster may take minutes to notice.
    """
    silent = [node for node in nodes if node.get("silent_jobs") and state_of(node) not in ("silent", "dead")]
    if not silent:
        return ""
    where = ", ".join(one_line(node["name"]) for node in silent)
    return f"no sign of life from jobs on {where}: see `shoal why {one_line(silent[0]['silent_jobs'][0])}`"


def row(node: dict[str, Any]) -> tuple[str, ...]:
    gpus = node.get("gpus") or []
    return (
        node["name"],
        node.get("pool") or "",
        state_of(node),
        f"{number(node.get('gpus_used'))}/{len(gpus)} {gpu_kinds(gpus)}".strip() if gpus else "-",
        f"{number(node.get('cpus_used'))}/{number(node.get('cpus'))}",
        size(node.get("memory_bytes")),
        ("simulated " if node.get("is_simulated") else "") + (node.get("confinement") or "none"),
    )


def state_of(node: dict[str, Any]) -> str:
    """Return the operator's decision, else that the node is silent, closed (a remark says why) or has others'
    work.
    """
    if node.get("is_gone"):
        return "gone"
    if node["state"] == "dead":
        return "dead"
    if not node.get("is_alive", True) and not node.get("closed"):
        return "silent"
    is_shut = node["state"] == "ready" and not node.get("takes_work", True)
    if node["state"] == "ready" and not is_shut and node.get("is_busy"):
        return "busy"
    return "closed" if is_shut else str(node["state"])


def gpu_kinds(gpus: list[dict[str, Any]]) -> str:
    return ",".join(sorted({str(gpu.get("kind") or "") for gpu in gpus}))


def describe(node: dict[str, Any]) -> list[str]:
    reason = f' ("{one_line(node["because"])}")' if node.get("because") else ""
    actor = f" by {one_line(node['by'])}" if node.get("by") else ""
    labels = ", ".join(f"{one_line(k)}={one_line(v)}" for k, v in (node.get("labels") or {}).items())
    gpus = node.get("gpus") or []
    memory = f"{size(node.get('memory_used_bytes'))} of {size(node.get('memory_bytes'))}"
    facts = {
        "node": f"{one_line(node['name'])} (pool {one_line(node.get('pool') or '')})",
        "state": f"{state_of(node)}{actor}{reason}",
        "engine": one_line(node.get("engine") or ""),
        "GPUs": f"{number(node.get('gpus_used'))} of {len(gpus)} used {one_line(gpu_kinds(gpus))}".strip(),
        "CPUs": f"{number(node.get('cpus_used'))} of {number(node.get('cpus'))} used",
        "memory": f"{memory} used",
        "confinement": one_line(node.get("confinement") or "none"),
        "labels": labels or "-",
        "jobs": ", ".join(one_line(ref) for ref in node.get("jobs") or ()) or "-",
    }
    remarks = [("remark", one_line(remark)) for remark in node.get("remarks") or ()]
    return [f"{name:<12} {value}" for name, value in (*facts.items(), *remarks)]


@app.command
def cordon(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Give a node no new work; jobs that run there keep running."""
    return _decide("cordon", node, because, json=json)


@app.command
def drain(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Drain a node: stop its jobs and queue them again elsewhere."""
    return _decide("drain", node, because, json=json)


@app.command
def resume(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Let a cordoned, drained or dead node take work again."""
    return _decide("resume", node, because, json=json)


@app.command(name="declare-dead")
def declare_dead(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Assert that nothing runs on a node any more, so that its jobs are replaced now.

    Do this only when it is certain (powered off, deleted): a job that still
    runs there would run twice.
    """
    return _decide("declare_dead", node, because, json=json)


@app.command
def remove(node: NodeName, *, json: JsonFlag = False) -> int:
    """Remove a node that does not answer and holds nothing. If it returns, it is a new node."""
    with connect() as shoal:
        shoal.remove_node(node)
    if json:
        print_json({"name": node})
    else:
        print(f"{one_line(node)}: removed")
    return 0


def _decide(verb: str, node: str, because: str, *, json: bool) -> int:
    with connect() as shoal:
        after: dict[str, Any] = getattr(shoal, verb)(node, because)
    if json:
        print_json(after)
    else:
        print(f"{one_line(after['name'])}: {decision_text(verb, after)}")
    return 0


def decision_text(verb: str, after: dict[str, Any]) -> str:
    """Say what was decided, what follows for the jobs there, and what the decision does not change."""
    shown = state_of(after)
    if verb == "declare_dead":
        jobs = [one_line(ref) for ref in after.get("begin_anew") or ()]
        return f"declared dead{restart_text(jobs)}"
    if verb == "resume" and shown != after["state"]:
        why = one_line(after.get("closed") or "") or f"it is {shown}"
        return f"resumed, but it takes no work yet: {why}"
    return f"{after['state']}, and {shown}" if shown in ("silent", "gone") else shown


def restart_text(jobs: list[str]) -> str:
    return f"; {', '.join(jobs)} restart{'s' if len(jobs) == 1 else ''}" if jobs else ""
