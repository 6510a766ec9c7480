"""A machine that was to leave, and does not, beside a real Slurm: what it was there, it is again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.cluster.leaving import quiet_node, woken_node
from tests.support.bare_machines import host, three
from tests.support.slurm_lab import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]
NODE = "n1"
INVENTORY = three().with_hosts([three().hosts[0], host(NODE, 2)])


@pytest.fixture(autouse=True)
def mended(slurm: SlurmLab) -> Iterator[None]:
    yield
    if not slurm.pids_on(NODE):
        slurm.start_node(NODE)
    slurm.resume(NODE)


def state(slurm: SlurmLab) -> str:
    shown = slurm.run("scontrol", "show", "node", NODE)
    return shown.partition(" State=")[2].split()[0].removesuffix("+NOT_RESPONDING")


@pytest.mark.parametrize("is_dead", [False, True])
def test_a_machine_that_does_not_leave_after_all_is_what_it_was(slurm: SlurmLab, *, is_dead: bool) -> None:
    if is_dead:
        slurm.crash_node(NODE)
        slurm.give_up(NODE)
    before = state(slurm)
    leaving = quiet_node(INVENTORY.host(NODE), INVENTORY, is_forced=False, is_away=is_dead)
    slurm.run("sh", "-c", leaving.apply)
    assert state(slurm) == f"{before}+DRAIN"
    woken = woken_node(INVENTORY.host(NODE), INVENTORY)
    slurm.run("sh", "-c", f"! {{ {woken.check}; }}")
    slurm.run("sh", "-c", woken.apply)
    assert state(slurm) == before
    slurm.run("sh", "-c", woken.check)
    if not is_dead:
        slurm.until(lambda: NODE in slurm.usable(), "it takes jobs")
