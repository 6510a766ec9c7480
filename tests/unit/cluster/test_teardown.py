"""Fake machines that leave a cluster by remove or destroy: what Shoal installed goes, nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shoal.cli.cluster.report import closing_lines, host_state
from shoal.cli.cluster.report import progress_lines as told_by
from shoal.cli.cluster.selection import split_joining
from shoal.cluster.inventory import HostRole, Inventory, InventoryHost
from shoal.cluster.operations import ClusterReport, OperationOptions, add, create, destroy, remove, upgrade
from shoal.cluster.session import ClusterSession
from shoal.errors import EngineRefused, StateError
from tests.support.fakes.machines import (
    CLUSTER_ID,
    FakeMachine,
    FakeMachines,
    facts_of,
    facts_text,
    failed_titles,
    only_changes_work,
    three_hosts,
    with_hardware,
)


def labels(report: ClusterReport) -> list[str]:
    assert report.inventory is not None
    return [item.label for item in report.inventory.hosts]


def states(report: ClusterReport) -> dict[str, str]:
    assert report.inventory is not None
    return {item.label: host_state(item) for item in report.inventory.hosts}


async def removed(
    paper: FakeMachines, inventory: Inventory, *refs: str, is_forced: bool = False
) -> tuple[ClusterSession, ClusterReport]:
    session = paper.session()
    going = [inventory.host(ref) for ref in refs]
    return session, await remove(session, inventory, going, OperationOptions(is_forced=is_forced))


async def test_a_dead_machine_may_be_removed_and_is_no_failure() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory, only_changes_work)
    del paper.machines["10.0.0.3"]
    session, report = await removed(paper, inventory, "c")
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    assert set(session.failed) - report.gone == set()
    assert "c did not answer" in report.remarks[-1]


async def test_machine_that_never_joined_is_just_dropped_from_the_inventory() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    mistyped = InventoryHost(address="10.0.0.33")
    session, report = await removed(
        FakeMachines(inventory), inventory.with_hosts([*inventory.hosts, mistyped]), "10.0.0.33"
    )
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b", "c"]
    expected = "10.0.0.33 did not answer: it was not a node of the cluster, and is out of the inventory"
    assert report.remarks[-1] == expected
    assert f"note: {expected}" in closing_lines("lab", session, report, 1.0, is_dry=False)


async def test_a_machine_that_is_out_and_could_not_be_cleaned_can_be_removed_again() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    facts = facts_text("c", "10.0.0.3", "own cluster lab", "own started slurmd")
    paper.machines["10.0.0.3"] = FakeMachine(facts, lambda _: 1)
    session, report = await removed(paper, inventory, "c")
    assert failed_titles(session) == {"c": "slurmd does not run"}
    assert set(session.failed) - report.gone == {"10.0.0.3"}
    expected = "c is no longer a node, but was not cleaned: `shoal cluster remove c --cluster lab` again"
    assert report.remarks[-1] == expected
    assert not any(
        "leave it out" in line for line in closing_lines("lab", session, report, 1.0, is_dry=False)
    )
    assert labels(report) == ["a", "b", "c"]
    paper.machines["10.0.0.3"].exit_code_of = lambda _: 0
    assert report.inventory is not None
    _, again = await removed(paper, report.inventory, "c")
    assert labels(again) == ["a", "b"]


async def unclean(paper: FakeMachines) -> Inventory:
    """A cluster after c, known only by its own name, has left and could not be cleaned."""
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    nameless = [item.model_copy(update={"name": None}) for item in inventory.hosts]
    facts = facts_text("c", "10.0.0.3", "own cluster lab", "own started slurmd")
    paper.machines["10.0.0.3"] = FakeMachine(facts, lambda _: 1)
    _, report = await removed(paper, inventory.with_hosts(nameless), "c")
    assert report.inventory is not None
    paper.machines["10.0.0.3"].exit_code_of = lambda _: 0
    paper.machines["10.0.0.3"].scripts.clear()
    return report.inventory


async def test_unreachable_uncleaned_machine_reports_what_stays_there() -> None:
    paper = FakeMachines(three_hosts())
    inventory = await unclean(paper)
    del paper.machines["10.0.0.3"]
    _, report = await removed(paper, inventory, "c")
    assert labels(report) == ["a", "b"]
    assert report.remarks[-1] == (
        "c did not answer: it was not cleaned when it left, and is out of the inventory; Shoal's files"
        " stay there, perhaps with the cluster's munge key"
    )


async def test_machine_that_left_returns_only_by_add() -> None:
    paper = FakeMachines(three_hosts())
    inventory = await unclean(paper)
    for report in (
        await create(paper.session(), inventory, OperationOptions()),
        await upgrade(paper.session(), inventory, OperationOptions()),
        (await removed(paper, inventory, "b"))[1],
    ):
        assert report.inventory is not None
        assert [item.label for item in report.inventory.hosts if not item.hardware] == ["c"]
        assert "`shoal cluster remove c --cluster lab` again" in report.remarks[-1]
    assert paper.machines["10.0.0.3"].scripts == []
    rest, new = split_joining(inventory, (InventoryHost(address="10.0.0.3"),))
    report = await add(paper.session(), rest, new, OperationOptions())
    assert report.inventory is not None
    assert [item.label for item in report.inventory.members if item.hardware] == ["a", "b", "c"]


async def test_uncleaned_machine_that_cannot_rejoin_stays_marked() -> None:
    paper = FakeMachines(three_hosts())
    inventory = await unclean(paper)
    paper.refusing = {"10.0.0.3"}
    rest, new = split_joining(
        inventory, (InventoryHost(address="10.0.0.3", user="ana"), InventoryHost(address="10.0.0.9"))
    )
    session = paper.session()
    report = await add(session, rest, new, OperationOptions())
    assert set(session.failed) == {"10.0.0.3", "10.0.0.9"}
    assert report.inventory is not None
    assert [(item.label, item.is_unclean) for item in report.inventory.hosts] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    assert "`shoal cluster remove c --cluster lab` again" in report.remarks[-1]


def changes(paper: FakeMachines) -> list[str]:
    scripts = [script for machine in paper.machines.values() for script, _ in machine.scripts]
    return [script for script in scripts if "&& echo yes || echo no" not in script]


async def test_a_machine_that_does_not_answer_stays_while_slurm_has_jobs_on_it() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    del paper.machines["10.0.0.3"]
    paper.machines["10.0.0.1"].exit_code_of = lambda script: 1 if "squeue -h -w c" in script else 0
    with pytest.raises(EngineRefused, match="the controller, a, failed at `node c takes no new jobs"):
        await removed(paper, inventory, "b", "c")
    (change,) = changes(paper)  # b was not drained first
    assert "nodename=c state=drain" in change
    assert "nodename=c state=undrain" in change


async def test_forced_removal_of_a_silent_machine_marks_it_down_in_slurm() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    del paper.machines["10.0.0.3"]
    paper.machines["10.0.0.1"].exit_code_of = lambda script: int(
        "squeue -h -w c" in script and not script.startswith("refuse() {")
    )
    session, report = await removed(paper, inventory, "c", is_forced=True)
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    (change,) = changes(paper)
    assert change.endswith("nodename=c state=down reason=leaves")
    assert set(session.failed) - report.gone == set()


async def test_machine_that_refuses_the_login_is_not_dead() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    paper.refusing = {"10.0.0.3"}
    with pytest.raises(EngineRefused, match=r"c did not let us in, and may have jobs: .* none of our keys"):
        await removed(paper, inventory, "c")
    assert changes(paper) == []
    session, report = await removed(paper, inventory, "c", is_forced=True)
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    assert report.remarks[-1] == (
        "c did not let us in: it is out, and Shoal's files stay there, with the cluster's munge key"
    )
    assert set(session.failed) - report.gone == set()
    assert (
        states(await destroy(paper.session(), inventory, OperationOptions()))["c"] == "destroy did not finish"
    )
    assert (await destroy(paper.session(), inventory, OperationOptions(is_forced=True))).inventory is None


async def test_cluster_is_not_destroyed_while_running_jobs_are_unknown() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    paper.refusing = {"10.0.0.1"}
    with pytest.raises(EngineRefused, match="the controller, a, cannot be used"):
        await destroy(paper.session(), inventory, OperationOptions())
    assert [machine.scripts for machine in paper.machines.values()] == [[], [], []]
    report = await destroy(paper.session(), inventory, OperationOptions(is_forced=True))
    assert report.inventory is None
    assert report.remarks == ["a did not let us in: Shoal's files stay there"]


async def test_a_machine_with_jobs_stays() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    paper.machines["10.0.0.1"].exit_code_of = lambda script: 1 if "squeue -h -w c" in script else 0
    session, report = await removed(paper, inventory, "c")
    assert report.inventory == inventory
    assert failed_titles(session) == {"c": "node c takes no new jobs, and none runs there"}
    assert paper.machines["10.0.0.3"].scripts == []


async def test_a_machine_with_jobs_stays_and_nothing_else_is_changed() -> None:
    """No other machine is repaired on the way, and the node is not drained before the check."""
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory, lambda _: 1)
    session, report = await removed(paper, inventory, "c")
    assert report.inventory == inventory
    assert {address for address, machine in paper.machines.items() if machine.scripts} == {"10.0.0.1"}
    refused = closing_lines("lab", session, report, 1.0, is_dry=False)
    assert (refused[0], refused[-1]) == ("refused: c: it broke", "cluster lab: stopped; nothing was changed")


async def test_impossible_removal_is_refused_before_a_drain() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    paper.machines["10.0.0.1"].facts = facts_text("a", "10.0.0.1", "file /etc/slurm/slurm.conf 11")
    with pytest.raises(EngineRefused, match="that was there before Shoal"):
        await removed(paper, inventory, "c")
    assert [machine.scripts for machine in paper.machines.values()] == [[], [], []]


@pytest.mark.parametrize("is_ours", [True, False])
async def test_drained_nodes_that_do_not_leave_are_undrained(*, is_ours: bool) -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)

    def judge(script: str) -> int:
        if "Reason=leaves" in script and "refuse()" not in script:
            return int(is_ours)  # looked at afterwards
        return int("slurmctld" in script)

    paper.machines["10.0.0.1"].exit_code_of = judge
    session = paper.session()
    with pytest.raises(EngineRefused, match="the controller, a, failed at `packages"):
        await remove(session, inventory, [inventory.host("b"), inventory.host("c")], OperationOptions())
    woken = [line for outcome in session.outcomes for line in told_by(outcome) if "as before" in line]
    undrained = ["b: node b takes jobs as before", "c: node c takes jobs as before"]
    assert woken == (undrained if is_ours else [])


async def test_the_last_machine_for_jobs_is_not_removed() -> None:
    """A slurmctld without any node does not start."""
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    first = inventory.hosts[0].model_copy(update={"roles": (HostRole.CONTROLLER, HostRole.DATABASE)})
    inventory = inventory.with_hosts([first, *inventory.hosts[1:]])
    paper = FakeMachines(inventory)
    with pytest.raises(StateError, match="no machine for jobs would be left without b, c") as no:
        await removed(paper, inventory, "b", "c")
    assert "`shoal cluster add ADDRESS --cluster lab` first" in (no.value.hint or "")
    assert [machine.scripts for machine in paper.machines.values()] == [[], [], []]
    assert labels((await removed(paper, inventory, "c"))[1]) == ["a", "b"]


async def test_the_controller_is_not_removed() -> None:
    with pytest.raises(StateError, match="without it there is no cluster"):
        await removed(FakeMachines(three_hosts()), three_hosts(), "a")


async def test_cluster_is_gone_when_every_machine_is_clean() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    records = ("own cluster lab", "own made names")
    paper = FakeMachines(inventory, only_changes_work)
    for item in inventory.hosts:
        paper.machines[item.address] = FakeMachine(
            facts_text(item.label, item.address, *records), lambda _: 0
        )
    report = await destroy(paper.session(), inventory, OperationOptions())
    assert report.inventory is None


async def test_unfinished_destroy_is_tracked_per_machine() -> None:
    paper = FakeMachines(three_hosts())
    inventory = await unclean(paper)
    del paper.machines["10.0.0.2"]
    half = await destroy(paper.session(), inventory, OperationOptions())
    assert states(half) == {"a": "not joined", "b": "destroy did not finish"}, "c, which had left, is clean"
    assert "`shoal cluster destroy --cluster lab --yes` again when it can be" in half.remarks[-1]
    assert half.inventory is not None
    whole = await create(FakeMachines(three_hosts()).session(), half.inventory, OperationOptions())
    assert states(whole) == {"a": "joined", "b": "joined"}
    away = await create(paper.session(), half.inventory, OperationOptions())
    assert states(away) == {"a": "joined", "b": "destroy did not finish"}
    assert (
        await destroy(FakeMachines(three_hosts()).session(), half.inventory, OperationOptions())
    ).inventory is None


async def test_another_clusters_machine_is_left_alone_by_destroy() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory, only_changes_work)
    paper.machines["10.0.0.2"] = FakeMachine(
        facts_text("b", "10.0.0.2", "own cluster other"), only_changes_work
    )
    await destroy(paper.session(), inventory, OperationOptions())
    assert paper.machines["10.0.0.2"].scripts == []


async def test_lost_machine_can_be_given_up() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    del paper.machines["10.0.0.2"]
    report = await destroy(paper.session(), inventory, OperationOptions(is_forced=True))
    assert (report.inventory, report.gone) == (None, frozenset({"10.0.0.2"}))
    assert report.remarks == ["b did not answer: Shoal's files stay there"]


async def test_blocking_jobs_are_reported_once() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    paper.machines["10.0.0.1"].exit_code_of = lambda script: int("squeue" in script)
    session = paper.session()
    report = await remove(session, inventory, [inventory.host("c")], OperationOptions())
    assert [line for outcome in session.outcomes for line in told_by(outcome)] == []
    assert sum("it broke" in line for line in closing_lines("lab", session, report, 1.0, is_dry=False)) == 1


def stolen(*names: str) -> tuple[FakeMachines, Inventory]:
    """A cluster of which these machines now belong to another cluster of the same name."""
    inventory = with_hardware(three_hosts(id=CLUSTER_ID), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    for item in inventory.hosts:
        claim = f"own cluster lab {'6b' * 16 if item.label in names else CLUSTER_ID}"
        text = facts_text(item.label, item.address, claim, "own started slurmd", "own started slurmctld")
        paper.machines[item.address] = FakeMachine(text, only_changes_work)
    return paper, inventory


async def test_a_cluster_of_the_same_name_is_neither_asked_nor_upgraded_nor_drained() -> None:
    paper, inventory = stolen("a")
    works: list[Callable[[ClusterSession], Awaitable[ClusterReport]]] = [
        lambda session: upgrade(session, inventory, OperationOptions()),
        lambda session: remove(session, inventory, [inventory.host("c")], OperationOptions(is_forced=True)),
        lambda session: destroy(session, inventory, OperationOptions()),
    ]
    for work in works:
        with pytest.raises(
            EngineRefused, match="the controller, a, cannot be used: belongs to a cluster `lab`"
        ):
            await work(paper.session())
    with pytest.raises(EngineRefused) as no:
        await destroy(paper.session(), inventory, OperationOptions())
    assert (no.value.hint or "").startswith("`shoal cluster destroy --cluster lab --yes --force` leaves")
    assert [machine.scripts for machine in paper.machines.values()] == [[], [], []]
    await destroy(paper.session(), inventory, OperationOptions(is_forced=True))
    assert paper.machines["10.0.0.1"].scripts == [], "its jobs are not ended either"


async def test_machine_taken_by_another_cluster_is_left_alone_with_a_remark() -> None:
    paper, inventory = stolen("c")
    await upgrade(paper.session(), inventory, OperationOptions())
    _, smaller = await removed(paper, inventory, "c")
    assert labels(smaller) == ["a", "b"]
    paper.machines["10.0.0.1"].exit_code_of = lambda _: 0
    down = await destroy(paper.session(), inventory, OperationOptions())
    assert down.inventory is None
    for report in (smaller, down):
        assert any(
            line.startswith("c is left alone: it belongs to a cluster `lab`") for line in report.remarks
        )
    assert paper.machines["10.0.0.3"].scripts == []
