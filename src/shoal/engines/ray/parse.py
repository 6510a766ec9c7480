"""Turns what Ray and its agents report into nodes and observations. Pure; unknown fields are ignored.

Ray has no fence: a node that it calls dead may only be cut off, with everything on it running. So no report
of Ray ends a task. An agent's report does, because the agent has looked at the node's processes itself and
ended what was left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.engines.ray.config import TOKENS_SINCE
from shoal.engines.refusal import is_name
from shoal.engines.remote.cluster_observation import Boot, ClusterObservation, ClusterTaskState
from shoal.errors import EngineUnreachable, ShoalError, SpecError
from shoal.model.evidence import Evidence
from shoal.model.node import Gpu, NodeFacts

UNREACHED = "is this machine one of its nodes? `ray start --address HOST:PORT --num-cpus=0` makes it one"
"""The hint for a Ray whose head has answered a probe."""
ACCELERATOR = "accelerator_type:"
_NOT_NAME = re.compile(r"[^A-Za-z0-9._-]")
_TOKEN = re.compile(r"(?:InvalidAuthToken|AuthenticationError).*")
_VERSIONS = re.compile(r"Ray: (?P<ray>\S+)\s+Python: (?P<python>\S+)")


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """One living raylet. After a restart it has another `node_id` and the same name."""

    node_id: str
    facts: NodeFacts
    boot: Boot | None = None
    """None: its agent does not reply, or nothing distinguishes the machine from others."""
    uid: int | None = None


def parse_nodes(reply: Mapping[str, Any]) -> list[RayNode]:
    """Return, by name, the living nodes with CPUs in the bridge's reply to `nodes`."""
    nodes: dict[str, RayNode] = {}
    for row in sorted(reply["rows"], key=lambda row: str(row["NodeID"])):
        if not row["Alive"] or not row["Resources"].get("CPU"):
            continue
        node = _node(row, reply["facts"].get(row["NodeID"]), reply["failed"].get(row["NodeID"], ""))
        other = nodes.get(node.facts.name)
        if other is None:
            nodes[node.facts.name] = node
        else:
            remark = (
                f"several raylets are called {node.facts.name}, and one of them is used: "
                "start each with a `--node-name` of its own"
            )
            better = other if other.facts.is_alive else node
            facts = msgspec.structs.replace(better.facts, remarks=(*better.facts.remarks, remark))
            nodes[node.facts.name] = msgspec.structs.replace(better, facts=facts)
    return [nodes[name] for name in sorted(nodes)]


def node_name(row: Mapping[str, Any]) -> str:
    """Return the raylet's name (`ray start --node-name`), else its address: both outlive it."""
    name = _NOT_NAME.sub("-", str(row.get("NodeName") or row["NodeManagerAddress"]))
    return name if is_name(name) else f"node{name}"[:128]


def _node(row: Mapping[str, Any], facts: Mapping[str, Any] | None, failed: str) -> RayNode:
    resources: Mapping[str, float] = row["Resources"]
    labels = {str(name): str(value) for name, value in (row.get("Labels") or {}).items()}
    labels = {name: value for name, value in labels.items() if not name.startswith("ray.io/")}
    remarks: tuple[str, ...] = (
        ()
        if facts is not None
        else (f"Ray says it lives, but Shoal's agent there does not answer: {failed}",)
    )
    known_facts = facts or {}
    if known_facts.get("ends_with"):
        remarks = (*remarks, systemd_remark(str(known_facts["ends_with"])))
    if known_facts.get("hostname"):
        labels["hostname"] = str(known_facts["hostname"])
    return RayNode(
        node_id=row["NodeID"],
        boot=_boot(known_facts),
        uid=known_facts.get("uid"),
        facts=NodeFacts(
            name=node_name(row),
            address=str(row["NodeManagerAddress"]),
            cpus=float(resources["CPU"]),
            memory_bytes=int(known_facts.get("memory_bytes") or resources.get("memory") or 1),
            disk_bytes=int(known_facts.get("disk_bytes") or 0),
            gpus=_gpus(resources, known_facts.get("devices"), known_facts.get("minors") or ()),
            is_alive=facts is not None,
            confinement="unknown",
            labels=labels,
            remarks=remarks,
        ),
    )


def systemd_remark(unit: str) -> str:
    """Return the remark on a node whose service manager would end jobs together with Ray."""
    return (
        f"jobs there are killed when {unit} ends or is restarted: set `KillMode=process` in it, as "
        "deploy/systemd has it"
    )


def _boot(facts: Mapping[str, Any]) -> Boot | None:
    machine, boot_id = facts.get("machine"), facts.get("boot_id")
    return Boot(machine=str(machine), boot_id=str(boot_id)) if machine and boot_id else None


def _gpus(resources: Mapping[str, float], devices: str | None, minors: Sequence[int]) -> tuple[Gpu, ...]:
    """Return as many GPUs as Ray counts, numbered as by the driver: a raylet may have been given some of
    them.

    If the raylet was visible GPUs by other names, or in another number, return none, because they could be
    other users'. `minors`: of all device files of the machine, in the driver's order.
    """
    count = int(resources.get("GPU", 0))
    kinds = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
    visible = [part.strip() for part in (devices or "").split(",") if part.strip()]
    is_numbered = len(visible) == count and all(part.isdigit() for part in visible)
    if visible and not is_numbered:
        return ()
    numbers = [int(part) for part in visible] if visible else list(range(count))
    return tuple(
        Gpu(
            index=number,
            kind=kinds[0] if kinds else "GPU",
            minor=minors[number] if number < len(minors) else None,
        )
        for number in numbers
    )


def connection_error(message: str, address: str, log: str = "") -> ShoalError:
    """Return, as an error for the person who must act, why the bridge could not connect.

    `log`: Ray's output. Ray tries a wrong token for a minute and then reports only that it could not
    connect.
    """
    versions = [match.groupdict() for match in _VERSIONS.finditer(message)]
    if "Version mismatch" in message and len(versions) == 2:
        theirs, ours = versions
        return SpecError(
            f"the Ray at {address} is {theirs['ray']} on Python {theirs['python']}, and here is Ray "
            f"{ours['ray']} on Python {ours['python']}: Ray wants the very same everywhere",
            hint=f"name a Python {theirs['python']} with `pip install ray=={theirs['ray']}` in it: "
            "`shoal connect ray --ray-python PATH`",
        )
    token = _TOKEN.search(f"{message}\n{log}")
    if token is not None:
        return SpecError(
            f"the Ray at {address} does not take the token: {token[0].strip()}",
            hint="`ray get-auth-token` on its head prints it: write that to the token file",
        )
    return missing_ray_error(message) or EngineUnreachable(
        f"the Ray at {address} cannot be reached: {_first_line(message)}", hint=UNREACHED
    )


def missing_ray_error(output: str, python: str = "that Python") -> SpecError | None:
    """Return an error if the output says that Ray is missing: no second try helps."""
    if "No module named 'ray'" not in output:
        return None
    return SpecError(
        f"there is no Ray in {python}",
        hint="`pip install 'shoal[ray]'` (from a clone: `pip install -c constraints.txt -e '.[ray]'`), or "
        "name a Python with Ray in it: `shoal connect ray --ray-python PATH`",
    )


def check_version(version: str) -> None:
    """Raise `SpecError` for a Ray without tokens."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < TOKENS_SINCE:
        raise SpecError(
            f"Ray {version} accepts every client; {'.'.join(map(str, TOKENS_SINCE))} is the first "
            "with tokens",
            hint="`pip install ray==2.60.0` on every node",
        )


def _first_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else "it said nothing"


def is_about(report: dict[str, Any], assigned_process: str) -> bool:
    """Return whether the report is about exactly the process that has the task spec.

    The agent may know another node agent that asked for it in vain, because that was started on another
    machine of the same name.
    """
    return bool(assigned_process) and report.get("process") == assigned_process


def task_observation(node: str, report: dict[str, Any], assigned_process: str) -> ClusterObservation:
    """Return the observation of a task from the report of the agent on its node.

    `assigned_process`: the process that has the task spec; empty: none. The end of another process is no
    evidence. A record of an older Shoal names no process, so it ends nothing, but leftovers of it
    hold off a fence.
    """
    pid, last_message = (
        report["pid"],
        f"; it last said: {report['said']}" if report.get("said") else "",
    )
    is_its = is_about(report, assigned_process)
    may_be_its = is_its or not report.get("process")
    whose = (
        "its node agent"
        if may_be_its or not assigned_process
        else "a node agent that did not get its task spec"
    )
    if report["state"] == "running":
        return ClusterObservation(
            state=ClusterTaskState.RUNNING, raw=f"{whose} is process {pid} on {node}{last_message}"
        )
    if report["state"] == "over":
        raw = f"{whose}, process {pid} on {node}, has ended{last_message}"
        evidence = Evidence.ENDED if is_its else Evidence.UNKNOWN
        return ClusterObservation(state=ClusterTaskState.ENDED, raw=raw, evidence=evidence)
    if report["state"] == "hidden" and pid is None:
        return ClusterObservation(
            state=ClusterTaskState.UNKNOWN,
            raw=f"the record of its node agent on {node} is not trusted: {report['said']}",
        )
    if report["state"] == "hidden":
        return ClusterObservation(
            state=ClusterTaskState.UNKNOWN,
            raw=f"{whose} was started on {node} in a container that is gone{last_message}",
        )
    is_left = report["state"] == "left"
    problem = "is gone, and something of its task does not die" if is_left else "is gone"
    raw = f"{whose}, process {pid} on {node}, {problem}{last_message}"
    evidence = Evidence.ORPHANED_PER_CLUSTER if is_left and may_be_its else Evidence.UNKNOWN
    return ClusterObservation(state=ClusterTaskState.UNKNOWN, raw=raw, evidence=evidence)


def restarted_observation(node: str) -> ClusterObservation:
    """Return the observation of a task that began before the machine was restarted: nothing outlives that."""
    return ClusterObservation(
        state=ClusterTaskState.ENDED, raw=f"{node} was restarted since", evidence=Evidence.ENDED
    )


def unknown_observation(reason: str, stranded: str = "") -> ClusterObservation:
    return ClusterObservation(state=ClusterTaskState.UNKNOWN, raw=reason, stranded_reason=stranded)
