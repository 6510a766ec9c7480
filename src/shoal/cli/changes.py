"""What `shoal whatif` is asked to change: read before anything that takes long, applied after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.cli.show import note
from shoal.cli.sim_flags import times_of

if TYPE_CHECKING:
    from shoal.scheduler import Policy
    from shoal.sim.machines import Shape
    from shoal.sim.scenario import Scenario


class Asked(NamedTuple):
    shapes: list[Shape]
    removed: tuple[str, ...]
    quotas: dict[str, float]
    policy: Policy | None
    failures: float | None
    """So many times as often."""
    words: list[str]
    """What is different, as it was typed."""


def read_asked(
    add: tuple[str, ...],
    remove: tuple[str, ...],
    quota: tuple[str, ...],
    policy: Path | None,
    failures: str | None,
) -> Asked:
    """`SpecError`: what is wrong with a flag whatever the past or the trace looks like."""
    from shoal.control.policy_file import read_policy
    from shoal.sim.change import parse_quotas
    from shoal.sim.machines import parse_shape

    typed = {"add": add, "remove": remove, "quota": quota}
    words = [f"{word} {text}" for word, texts in typed.items() for text in texts]
    words += [f"policy {policy.name}"] if policy else []
    words += [f"failures {failures}"] if failures else []
    return Asked(
        shapes=[parse_shape(text, "--add") for text in add],
        removed=remove,
        quotas=parse_quotas(quota),
        policy=read_policy(policy) if policy else None,
        failures=times_of(failures, "--failures") if failures else None,
        words=words,
    )


def changed(before: Scenario, asked: Asked) -> Scenario:
    """`SpecError`: the past or the trace has no such node or project."""
    import msgspec

    from shoal.scheduler.power import unknown_racks
    from shoal.sim.change import with_nodes, with_quotas, without_nodes

    workload = without_nodes(with_nodes(before.workload, asked.shapes), asked.removed)
    after = msgspec.structs.replace(before, workload=with_quotas(workload, asked.quotas))
    if asked.policy is not None:
        unknown = unknown_racks(asked.policy.power_caps, (node.labels for node in after.workload.nodes))
        if unknown is not None:
            note(f"warning: {unknown}")
        after = msgspec.structs.replace(after, policy=asked.policy)
    if asked.failures is not None and before.failures is not None:
        after = msgspec.structs.replace(after, failures=before.failures.more_often(asked.failures))
    return after
