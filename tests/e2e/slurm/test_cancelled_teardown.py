"""A machine that was to leave, and does not, beside a real Slurm: what it was there, it is again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shoal.cluster.teardown import drain_step, undrain_step
from tests.support.fakes.machines import host, three_hosts
from tests.support.slurm.real_slurm import SlurmLab

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(300)]
NODE = "n1"
INVENTORY = three_hosts().with_hosts([three_hosts().hosts[0], host(NODE, 2)])


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
        slurm.report_crash(NODE)
    before = state(slurm)
    leaving = drain_step(INVENTORY.host(NODE), INVENTORY, is_forced=False, is_away=is_dead)
    slurm.run("sh", "-c", leaving.apply)
    assert state(slurm) == f"{before}+DRAIN"
    woken = undrain_step(INVENTORY.host(NODE), INVENTORY)
    slurm.run("sh", "-c", f"! {{ {woken.check}; }}")
    slurm.run("sh", "-c", woken.apply)
    assert state(slurm) == before
    slurm.run("sh", "-c", woken.check)
    if not is_dead:
        slurm.until(lambda: NODE in slurm.usable_nodes(), "it takes jobs")
