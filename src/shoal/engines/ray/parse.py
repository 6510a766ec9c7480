"""What Ray and the agents say, as values. Pure; unknown fields are passed over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.engines.boots import Boot
from shoal.engines.ray.config import TOKENS_SINCE
from shoal.engines.refusal import is_name
from shoal.errors import EngineUnreachable, ShoalError, SpecError
from shoal.model.node import Gpu, NodeFacts

UNREACHED = "is this machine one of its nodes? `ray start --address HOST:PORT --num-cpus=0` makes it one"
"""Of a Ray whose head has answered a knock."""
ACCELERATOR = "accelerator_type:"
_NOT_NAME = re.compile(r"[^A-Za-z0-9._-]")
_TOKEN = re.compile(r"(?:InvalidAuthToken|AuthenticationError).*")
_VERSIONS = re.compile(r"Ray: (?P<ray>\S+)\s+Python: (?P<python>\S+)")


class RayNode(msgspec.Struct, frozen=True, kw_only=True):
    """One raylet that lives. Started again it has another `node_id` and the same name."""

    node_id: str
    facts: NodeFacts
    boot: Boot | None = None
    """None: its agent does not answer, or nothing tells the machine from others."""
    uid: int | None = None


def parse_nodes(told: Mapping[str, Any]) -> list[RayNode]:
    """Of an answer of the bridge to `nodes`: those that live and have CPUs, by name."""
    found: dict[str, RayNode] = {}
    for row in sorted(told["rows"], key=lambda row: str(row["NodeID"])):
        if not row["Alive"] or not row["Resources"].get("CPU"):
            continue
        node = _node(row, told["facts"].get(row["NodeID"]), told["failed"].get(row["NodeID"], ""))
        other = found.get(node.facts.name)
        if other is None:
            found[node.facts.name] = node
        else:
            remark = (
                f"several raylets are called {node.facts.name}, and one of them is used: "
                "start each with a `--node-name` of its own"
            )
            better = other if other.facts.is_alive else node
            facts = msgspec.structs.replace(better.facts, remarks=(*better.facts.remarks, remark))
            found[node.facts.name] = msgspec.structs.replace(better, facts=facts)
    return [found[name] for name in sorted(found)]


def node_name(row: Mapping[str, Any]) -> str:
    """What the raylet was called (`ray start --node-name`), else its address: both outlive it."""
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
    told = facts or {}
    if told.get("ends_with"):
        remarks = (*remarks, killed_with(str(told["ends_with"])))
    if told.get("hostname"):
        labels["hostname"] = str(told["hostname"])
    return RayNode(
        node_id=row["NodeID"],
        boot=_boot(told),
        uid=told.get("uid"),
        facts=NodeFacts(
            name=node_name(row),
            address=str(row["NodeManagerAddress"]),
            cpus=float(resources["CPU"]),
            memory_bytes=int(told.get("memory_bytes") or resources.get("memory") or 1),
            disk_bytes=int(told.get("disk_bytes") or 0),
            gpus=_gpus(resources, told.get("devices"), told.get("minors") or ()),
            is_alive=facts is not None,
            confinement="unknown",
            labels=labels,
            remarks=remarks,
        ),
    )


def killed_with(unit: str) -> str:
    """Of a node whose jobs its service manager would end with Ray."""
    return (
        f"jobs there are killed when {unit} ends or is restarted: set `KillMode=process` in it, as "
        "deploy/systemd has it"
    )


def _boot(told: Mapping[str, Any]) -> Boot | None:
    machine, boot_id = told.get("machine"), told.get("boot_id")
    return Boot(machine=str(machine), boot_id=str(boot_id)) if machine and boot_id else None


def _gpus(resources: Mapping[str, float], devices: str | None, minors: Sequence[int]) -> tuple[Gpu, ...]:
    """As many as Ray counts, numbered as the driver does: a raylet may have been given some of them. None of
    those that it was given by other names, or in another number: they could be somebody else's. `minors`: of
    all device files of the machine, in the driver's order.
    """
    count = int(resources.get("GPU", 0))
    kinds = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
    given = [part.strip() for part in (devices or "").split(",") if part.strip()]
    is_numbered = len(given) == count and all(part.isdigit() for part in given)
    if given and not is_numbered:
        return ()
    numbers = [int(part) for part in given] if given else list(range(count))
    return tuple(
        Gpu(
            index=number,
            kind=kinds[0] if kinds else "GPU",
            minor=minors[number] if number < len(minors) else None,
        )
        for number in numbers
    )


def refusal(said: str, address: str, log: str = "") -> ShoalError:
    """Why the bridge could not connect, as an error for who must act. `log`: what Ray printed meanwhile: it
    tries a wrong token for a minute, and then says no more than that it could not connect.
    """
    versions = [match.groupdict() for match in _VERSIONS.finditer(said)]
    if "Version mismatch" in said and len(versions) == 2:
        theirs, ours = versions
        return SpecError(
            f"the Ray at {address} is {theirs['ray']} on Python {theirs['python']}, and here is Ray "
            f"{ours['ray']} on Python {ours['python']}: Ray wants the very same everywhere",
            hint=f"name a Python {theirs['python']} with `pip install ray=={theirs['ray']}` in it: "
            "`shoal connect ray --ray-python PATH`",
        )
    token = _TOKEN.search(f"{said}\n{log}")
    if token is not None:
        return SpecError(
            f"the Ray at {address} does not take the token: {token[0].strip()}",
            hint="`ray get-auth-token` on its head prints it: write that to the token file",
        )
    return without_ray(said) or EngineUnreachable(
        f"the Ray at {address} cannot be reached: {_first_line(said)}", hint=UNREACHED
    )


def without_ray(said: str, python: str = "that Python") -> SpecError | None:
    """Where it said so: no second try helps."""
    if "No module named 'ray'" not in said:
        return None
    return SpecError(
        f"there is no Ray in {python}",
        hint="`pip install 'shoal[ray]'` (from a clone: `pip install -c constraints.txt -e '.[ray]'`), or "
        "name a Python with Ray in it: `shoal connect ray --ray-python PATH`",
    )


def check_version(version: str) -> None:
    """`SpecError` for a Ray that has no tokens."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < TOKENS_SINCE:
        raise SpecError(
            f"Ray {version} lets anybody in who reaches it; {'.'.join(map(str, TOKENS_SINCE))} is the first "
            "with tokens",
            hint="`pip install ray==2.60.0` on every node",
        )


def _first_line(text: str) -> str:
    lines: Sequence[str] = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0][:300] if lines else "it said nothing"
