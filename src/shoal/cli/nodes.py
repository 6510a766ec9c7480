"""`shoal nodes`, `drain`, `resume`: machines, what stands around their jobs, and whether they take work."""

from __future__ import annotations

from typing import Annotated, Any

from cyclopts import App, Parameter

from shoal.cli.flags import Because, JsonFlag, connect
from shoal.cli.show import note, print_json, print_table
from shoal.cli.text import number, one_line, size, told_unanswered

app = App(name="nodes", help="List nodes; cordon, drain, resume, remove or declare them dead.")
HEADS = ("NODE", "POOL", "STATE", "GPUS", "CPUS", "MEMORY", "CONFINEMENT")
NodeName = Annotated[str, Parameter(help="As `shoal nodes` lists it.")]


@app.default
def nodes(
    name: Annotated[str | None, Parameter(help="Show this one.")] = None, *, json: JsonFlag = False
) -> int:
    """List nodes with what is in use, and which confinement is in force around their jobs."""
    with connect() as shoal:
        found = [shoal.node(name)] if name else shoal.nodes()
    if json:
        print_json(found[0] if name else found)
    elif name:
        print("\n".join(describe(found[0])))
    elif not found:
        print("no nodes; `shoal doctor` says what this machine could offer")
    else:
        rows = [row(node) for node in found]
        # A Slurm or a Ray does not say it: a column of nothing else is none.
        heads = HEADS if any(cells[-1] != "unknown" for cells in rows) else HEADS[:-1]
        print_table(heads, (cells[: len(heads)] for cells in rows), elastic=heads[-1])
    if not json:
        for said in filter(None, (unanswered(found), unheard(found))):
            note(f"-- {said}")
    return 0


def unanswered(nodes: list[dict[str, Any]]) -> str:
    """That what is known of these is old; empty where their cluster answers."""
    away = next((node for node in nodes if node.get("unanswered")), None)
    return told_unanswered(away["engine"], away["unanswered"]) if away else ""


def unheard(nodes: list[dict[str, Any]]) -> str:
    """On which of them jobs are silent though the cluster says nothing against the node: it may take minutes
    to notice. Empty: on none.
    """
    found = [node for node in nodes if node.get("silent_jobs") and state_of(node) not in ("silent", "dead")]
    if not found:
        return ""
    where = ", ".join(one_line(node["name"]) for node in found)
    return f"no sign of life from jobs on {where}: see `shoal why {one_line(found[0]['silent_jobs'][0])}`"


def row(node: dict[str, Any]) -> tuple[str, ...]:
    gpus = node.get("gpus") or []
    return (
        node["name"],
        node.get("pool") or "",
        state_of(node),
        f"{number(node.get('gpus_used'))}/{len(gpus)} {kinds(gpus)}".strip() if gpus else "-",
        f"{number(node.get('cpus_used'))}/{number(node.get('cpus'))}",
        size(node.get("memory_bytes")),
        ("simulated " if node.get("is_simulated") else "") + (node.get("confinement") or "none"),
    )


def state_of(node: dict[str, Any]) -> str:
    """What people decided, or that it does not answer, takes no work (a remark says why) or has others'."""
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


def kinds(gpus: list[dict[str, Any]]) -> str:
    return ",".join(sorted({str(gpu.get("kind") or "") for gpu in gpus}))


def describe(node: dict[str, Any]) -> list[str]:
    reason = f' ("{one_line(node["because"])}")' if node.get("because") else ""
    who = f" by {one_line(node['by'])}" if node.get("by") else ""
    labels = ", ".join(f"{one_line(k)}={one_line(v)}" for k, v in (node.get("labels") or {}).items())
    gpus = node.get("gpus") or []
    memory = f"{size(node.get('memory_used_bytes'))} of {size(node.get('memory_bytes'))}"
    facts = {
        "node": f"{one_line(node['name'])} (pool {one_line(node.get('pool') or '')})",
        "state": f"{state_of(node)}{who}{reason}",
        "engine": one_line(node.get("engine") or ""),
        "GPUs": f"{number(node.get('gpus_used'))} of {len(gpus)} used {one_line(kinds(gpus))}".strip(),
        "CPUs": f"{number(node.get('cpus_used'))} of {number(node.get('cpus'))} used",
        "memory": f"{memory} used",
        "confinement": one_line(node.get("confinement") or "none"),
        "labels": labels or "-",
        "jobs": ", ".join(one_line(ref) for ref in node.get("jobs") or ()) or "-",
    }
    told = [("remark", one_line(remark)) for remark in node.get("remarks") or ()]
    return [f"{name:<12} {value}" for name, value in (*facts.items(), *told)]


@app.command
def cordon(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Give a node no new work; what runs there runs on."""
    return _decide("cordon", node, because, json=json)


@app.command
def drain(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Take a node out of work: what runs there is stopped and queued again elsewhere."""
    return _decide("drain", node, because, json=json)


@app.command
def resume(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Give a cordoned, drained or dead node work again."""
    return _decide("resume", node, because, json=json)


@app.command(name="declare-dead")
def declare_dead(node: NodeName, *, because: Because = "", json: JsonFlag = False) -> int:
    """Assert that nothing runs on a node any more: its jobs are replaced now.

    Only say so when it is certain (powered off, deleted): a job still running
    there would run twice.
    """
    return _decide("declare_dead", node, because, json=json)


@app.command
def remove(node: NodeName, *, json: JsonFlag = False) -> int:
    """Take a node that does not answer and holds nothing off the list. It is new when it comes back."""
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
        print(f"{one_line(after['name'])}: {done(verb, after)}")
    return 0


def done(verb: str, after: dict[str, Any]) -> str:
    """What was decided, what follows for the jobs there, and what it does not change."""
    shown = state_of(after)
    if verb == "declare_dead":
        jobs = [one_line(ref) for ref in after.get("begin_anew") or ()]
        return f"declared dead{then_anew(jobs)}"
    if verb == "resume" and shown != after["state"]:
        why = one_line(after.get("closed") or "") or f"it is {shown}"
        return f"resumed here, and takes no work yet: {why}"
    return f"{after['state']}, and {shown}" if shown in ("silent", "gone") else shown


def then_anew(jobs: list[str]) -> str:
    return f"; {', '.join(jobs)} begin{'s' if len(jobs) == 1 else ''} anew" if jobs else ""
