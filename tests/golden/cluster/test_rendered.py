"""Every file a cluster gets, and every step of its making. `SHOAL_GOLDEN=write` renews the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.cluster import render
from shoal.cluster.facts import Facts
from shoal.cluster.inventory import Inventory, InventoryHost
from shoal.cluster.prerequisites import firewall_advice
from shoal.cluster.steps import Step, plan
from shoal.cluster.teardown import teardown_steps, upgrade_rounds
from tests.support.fakes.machines import (
    CLUSTER_ID,
    SECRETS,
    archives_of,
    facts_of,
    three_hosts,
    with_hardware,
)

FILES = Path(__file__).parent
GPUS = tuple(f"gpu {index} Disabled NVIDIA H100 80GB HBM3" for index in range(8))
MIXED = ("device /dev/nvidia0", "device /dev/nvidia2")
OWN = (
    "own cluster lab",
    "file /etc/munge/munge.key 11",
    "own files 11 /etc/munge/munge.key",
    "file /etc/slurm/slurm.conf 22",
    "own files 22 /etc/slurm/slurm.conf",
    "own made names",
    "own made mark /scratch/.shoal-cluster",
    "own made folder /var/spool/slurmd",
    "own started munge",
    "own started slurmd",
    "own packages slurmd",
)


def world() -> tuple[Inventory, dict[str, Facts]]:
    """Three machines: a controller with eight GPUs, one on another switch with two, one without."""
    inventory = three_hosts(
        id=CLUSTER_ID, slurm={"SlurmdTimeout": 30, "PrologFlags": "Contain"}, shared="/scratch"
    )
    hosts = [
        host.model_copy(update={"switch": "rack2"} if host.name == "b" else {}) for host in inventory.hosts
    ]
    inventory = inventory.with_hosts(hosts)
    facts = facts_of(inventory.hosts, {"a": (*GPUS, "firewall ufw"), "b": MIXED})
    return with_hardware(inventory, facts), facts


def files() -> dict[str, str]:
    inventory, facts = world()
    first = inventory.hosts[0]
    assert first.hardware is not None
    rendered = [
        render.slurm_conf(inventory, facts),
        render.gres_conf(inventory),
        render.topology_conf(inventory),
        render.cgroup_conf(facts[first.address]),
        render.slurmdbd_conf(inventory, SECRETS),
        render.mariadb_cnf(),
        render.health_check(first, first.hardware),
    ]
    texts = {Path(file.path).name: file.content.decode() for file in rendered}
    return texts | {"firewall.txt": "".join(f"{line}\n" for line in firewall_advice(inventory, facts))}


def shown(steps: list[Step]) -> str:
    """A plan as text: where, what, the look, the change, and what travels on standard input."""
    parts = []
    for step in steps:
        sent = f"<{len(step.stdin)} bytes on standard input>\n" if step.stdin else ""
        parts.append(
            f"== {step.stage.name} {step.label}: {step.title}\n? {step.check}\n! {step.apply}\n{sent}"
        )
    return "\n".join(parts)


def plans() -> dict[str, str]:
    inventory, facts = world()
    first, second, _ = inventory.hosts
    parts = archives_of(inventory.hosts)
    direct = facts | {first.address: _without_systemd(facts_of([first])[first.address])}
    leaving = facts_of([second], {"b": OWN})[second.address]
    return {
        "worker.steps": shown(_of(second, plan(inventory, facts, SECRETS, parts))),
        "controller-without-systemd.steps": shown(_of(first, plan(inventory, direct, SECRETS, parts))),
        "leaving.steps": shown(teardown_steps(second, leaving, has_packages_removed=True)),
        "upgrade.steps": "\n".join(shown(steps) for steps in upgrade_rounds(inventory, facts)),
    }


def _of(host: InventoryHost, steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.host == host.address]


def _without_systemd(fact: Facts) -> Facts:
    return Facts(**{**fact.__dict__, "init": "direct"})


@pytest.mark.parametrize("name", sorted(files() | plans()))
def test_rendered_files_and_steps_match_the_golden_files(name: str) -> None:
    text = (files() | plans())[name]
    path = FILES / name
    if os.environ.get("SHOAL_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_no_secret_stands_in_a_script() -> None:
    inventory, facts = world()
    secret = SECRETS.database_password
    for step in plan(inventory, facts, SECRETS, archives_of(inventory.hosts)):
        assert secret not in step.check + step.apply + step.title
        if step.stdin and (secret.encode() in step.stdin or SECRETS.munge_key in step.stdin):
            assert step.file is not None
            assert step.file.is_secret
    assert "a1a1" not in repr(SECRETS)
