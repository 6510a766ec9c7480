"""Machines on paper that leave a cluster, by remove or destroy: with what Shoal put there, and no more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from shoal.cli.cluster_inventory import apart
from shoal.cli.cluster_words import closing, state_of
from shoal.cli.cluster_words import told as told_by
from shoal.cluster.inventory import Host, Inventory, Role
from shoal.cluster.operate import Report, Wishes, add, create, destroy, remove, upgrade
from shoal.cluster.run import Crew
from shoal.errors import EngineRefused, StateError
from tests.support.bare_machines import ID, Paper, PaperMachine, facts_of, found, never, three, told, wrong


def labels(report: Report) -> list[str]:
    assert report.inventory is not None
    return [item.label for item in report.inventory.hosts]


def states(report: Report) -> dict[str, str]:
    assert report.inventory is not None
    return {item.label: state_of(item) for item in report.inventory.hosts}


async def removed(
    paper: Paper, inventory: Inventory, *refs: str, is_forced: bool = False
) -> tuple[Crew, Report]:
    crew = paper.crew()
    going = [inventory.host(ref) for ref in refs]
    return crew, await remove(crew, inventory, going, Wishes(is_forced=is_forced))


async def test_a_dead_machine_may_be_removed_and_is_no_failure() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory, never)
    del paper.machines["10.0.0.3"]
    crew, report = await removed(paper, inventory, "c")
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    assert set(crew.failed) - report.gone == set()
    assert "c did not answer" in report.remarks[-1]


async def test_a_machine_that_never_joined_is_out_of_the_inventory_and_had_nothing_of_ours() -> None:
    inventory = found(three(), facts_of(three().hosts))
    mistyped = Host(address="10.0.0.33")
    crew, report = await removed(
        Paper(inventory), inventory.with_hosts([*inventory.hosts, mistyped]), "10.0.0.33"
    )
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b", "c"]
    said = "10.0.0.33 did not answer: it was no node of the cluster, and is out of the inventory"
    assert report.remarks[-1] == said
    assert f"note: {said}" in closing("lab", crew, report, 1.0, is_dry=False)


async def test_a_machine_that_is_out_and_could_not_be_cleaned_can_be_removed_again() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    own = told("c", "10.0.0.3", "own cluster lab", "own started slurmd")
    paper.machines["10.0.0.3"] = PaperMachine(own, lambda _: 1)
    crew, report = await removed(paper, inventory, "c")
    assert wrong(crew) == {"c": "slurmd does not run"}
    assert set(crew.failed) - report.gone == {"10.0.0.3"}
    said = "c is no node any more, and was not cleaned: `shoal cluster remove c --cluster lab` again"
    assert report.remarks[-1] == said
    assert not any("leave it out" in line for line in closing("lab", crew, report, 1.0, is_dry=False))
    assert labels(report) == ["a", "b", "c"]
    paper.machines["10.0.0.3"].judge = lambda _: 0
    assert report.inventory is not None
    _, again = await removed(paper, report.inventory, "c")
    assert labels(again) == ["a", "b"]


async def unclean(paper: Paper) -> Inventory:
    """The cluster once c, which is known by its own name alone, has left and could not be cleaned."""
    inventory = found(three(), facts_of(three().hosts))
    nameless = [item.model_copy(update={"name": None}) for item in inventory.hosts]
    own = told("c", "10.0.0.3", "own cluster lab", "own started slurmd")
    paper.machines["10.0.0.3"] = PaperMachine(own, lambda _: 1)
    _, report = await removed(paper, inventory.with_hosts(nameless), "c")
    assert report.inventory is not None
    paper.machines["10.0.0.3"].judge = lambda _: 0
    paper.machines["10.0.0.3"].seen.clear()
    return report.inventory


async def test_of_a_machine_that_was_not_cleaned_and_is_away_now_it_is_said_what_stays_there() -> None:
    paper = Paper(three())
    inventory = await unclean(paper)
    del paper.machines["10.0.0.3"]
    _, report = await removed(paper, inventory, "c")
    assert labels(report) == ["a", "b"]
    assert report.remarks[-1] == (
        "c did not answer: it was not cleaned when it left, and is out of the inventory; what Shoal put there"
        " stays there, perhaps with the cluster's munge key"
    )


async def test_a_machine_that_has_left_comes_back_by_itself_in_no_other_command() -> None:
    paper = Paper(three())
    inventory = await unclean(paper)
    for report in (
        await create(paper.crew(), inventory, Wishes()),
        await upgrade(paper.crew(), inventory, Wishes()),
        (await removed(paper, inventory, "b"))[1],
    ):
        assert report.inventory is not None
        assert [item.label for item in report.inventory.hosts if not item.found] == ["c"]
        assert "`shoal cluster remove c --cluster lab` again" in report.remarks[-1]
    assert paper.machines["10.0.0.3"].seen == []
    rest, new = apart(inventory, (Host(address="10.0.0.3"),))
    report = await add(paper.crew(), rest, new, Wishes())
    assert report.inventory is not None
    assert [item.label for item in report.inventory.members if item.found] == ["a", "b", "c"]


async def test_a_machine_that_was_not_cleaned_and_cannot_join_again_is_still_known_as_that() -> None:
    paper = Paper(three())
    inventory = await unclean(paper)
    paper.shut = {"10.0.0.3"}
    rest, new = apart(inventory, (Host(address="10.0.0.3", user="ana"), Host(address="10.0.0.9")))
    crew = paper.crew()
    report = await add(crew, rest, new, Wishes())
    assert set(crew.failed) == {"10.0.0.3", "10.0.0.9"}
    assert report.inventory is not None
    assert [(item.label, item.is_unclean) for item in report.inventory.hosts] == [
        ("a", False),
        ("b", False),
        ("c", True),
    ]
    assert "`shoal cluster remove c --cluster lab` again" in report.remarks[-1]


def changes(paper: Paper) -> list[str]:
    scripts = [script for machine in paper.machines.values() for script, _ in machine.seen]
    return [script for script in scripts if "&& echo yes || echo no" not in script]


async def test_a_machine_that_does_not_answer_stays_while_slurm_has_jobs_on_it() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    del paper.machines["10.0.0.3"]
    paper.machines["10.0.0.1"].judge = lambda script: 1 if "squeue -h -w c" in script else 0
    with pytest.raises(EngineRefused, match="the controller, a, failed at `node c takes no new jobs"):
        await removed(paper, inventory, "b", "c")
    (asked,) = changes(paper)  # b was not drained first
    assert "nodename=c state=drain" in asked
    assert "nodename=c state=undrain" in asked


async def test_a_machine_that_does_not_answer_goes_by_force_and_slurm_is_told() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    del paper.machines["10.0.0.3"]
    paper.machines["10.0.0.1"].judge = lambda script: int(
        "squeue -h -w c" in script and not script.startswith("refuse() {")
    )
    crew, report = await removed(paper, inventory, "c", is_forced=True)
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    (asked,) = changes(paper)
    assert asked.endswith("nodename=c state=down reason=leaves")
    assert set(crew.failed) - report.gone == set()


async def test_a_machine_that_does_not_let_us_in_is_not_dead() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    paper.shut = {"10.0.0.3"}
    with pytest.raises(EngineRefused, match=r"c did not let us in, and may have jobs: .* none of our keys"):
        await removed(paper, inventory, "c")
    assert changes(paper) == []
    crew, report = await removed(paper, inventory, "c", is_forced=True)
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b"]
    assert report.remarks[-1] == (
        "c did not let us in: it is out, and what Shoal put there stays there, with the cluster's munge key"
    )
    assert set(crew.failed) - report.gone == set()
    assert states(await destroy(paper.crew(), inventory, Wishes()))["c"] == "destroy did not finish"
    assert (await destroy(paper.crew(), inventory, Wishes(is_forced=True))).inventory is None


async def test_a_cluster_is_not_taken_down_while_nobody_can_say_whether_jobs_run() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    paper.shut = {"10.0.0.1"}
    with pytest.raises(EngineRefused, match="the controller, a, cannot be used"):
        await destroy(paper.crew(), inventory, Wishes())
    assert [machine.seen for machine in paper.machines.values()] == [[], [], []]
    report = await destroy(paper.crew(), inventory, Wishes(is_forced=True))
    assert report.inventory is None
    assert report.remarks == ["a did not let us in: what Shoal put there stays there"]


async def test_a_machine_with_jobs_stays() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    paper.machines["10.0.0.1"].judge = lambda script: 1 if "squeue -h -w c" in script else 0
    crew, report = await removed(paper, inventory, "c")
    assert report.inventory == inventory
    assert wrong(crew) == {"c": "node c takes no new jobs, and none runs there"}
    assert paper.machines["10.0.0.3"].seen == []


async def test_a_machine_with_jobs_stays_and_nothing_else_is_changed() -> None:
    """No other machine is mended on the way, and the node is not drained before it is asked."""
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory, lambda _: 1)
    crew, report = await removed(paper, inventory, "c")
    assert report.inventory == inventory
    assert {address for address, machine in paper.machines.items() if machine.seen} == {"10.0.0.1"}
    refused = closing("lab", crew, report, 1.0, is_dry=False)
    assert (refused[0], refused[-1]) == ("refused: c: it broke", "cluster lab: stopped; nothing was changed")


async def test_a_cluster_that_would_not_do_is_objected_to_before_a_node_is_drained() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    paper.machines["10.0.0.1"].facts = told("a", "10.0.0.1", "file /etc/slurm/slurm.conf 11")
    with pytest.raises(EngineRefused, match="that was there before Shoal"):
        await removed(paper, inventory, "c")
    assert [machine.seen for machine in paper.machines.values()] == [[], [], []]


@pytest.mark.parametrize("is_ours", [True, False])
async def test_nodes_that_were_drained_take_jobs_as_before_if_they_do_not_leave_after_all(
    *, is_ours: bool
) -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)

    def judge(script: str) -> int:
        if "Reason=leaves" in script and "refuse()" not in script:
            return int(is_ours)  # looked at afterwards
        return int("slurmctld" in script)

    paper.machines["10.0.0.1"].judge = judge
    crew = paper.crew()
    with pytest.raises(EngineRefused, match="the controller, a, failed at `packages"):
        await remove(crew, inventory, [inventory.host("b"), inventory.host("c")], Wishes())
    woken = [line for outcome in crew.outcomes for line in told_by(outcome) if "as before" in line]
    told = ["b: node b takes jobs as before", "c: node c takes jobs as before"]
    assert woken == (told if is_ours else [])


async def test_the_last_machine_for_jobs_is_not_removed() -> None:
    """A slurmctld that has no node at all does not start."""
    inventory = found(three(), facts_of(three().hosts))
    first = inventory.hosts[0].model_copy(update={"roles": (Role.CONTROLLER, Role.DATABASE)})
    inventory = inventory.with_hosts([first, *inventory.hosts[1:]])
    paper = Paper(inventory)
    with pytest.raises(StateError, match="no machine for jobs would be left without b, c") as no:
        await removed(paper, inventory, "b", "c")
    assert "`shoal cluster add ADDRESS --cluster lab` first" in (no.value.hint or "")
    assert [machine.seen for machine in paper.machines.values()] == [[], [], []]
    assert labels((await removed(paper, inventory, "c"))[1]) == ["a", "b"]


async def test_the_controller_is_not_removed() -> None:
    with pytest.raises(StateError, match="without it there is no cluster"):
        await removed(Paper(three()), three(), "a")


async def test_a_cluster_is_gone_when_every_machine_let_go() -> None:
    inventory = found(three(), facts_of(three().hosts))
    own = ("own cluster lab", "own made names")
    paper = Paper(inventory, never)
    for item in inventory.hosts:
        paper.machines[item.address] = PaperMachine(told(item.label, item.address, *own), lambda _: 0)
    report = await destroy(paper.crew(), inventory, Wishes())
    assert report.inventory is None


async def test_a_destroy_that_did_not_finish_is_known_machine_by_machine_until_one_does() -> None:
    paper = Paper(three())
    inventory = await unclean(paper)
    del paper.machines["10.0.0.2"]
    half = await destroy(paper.crew(), inventory, Wishes())
    assert states(half) == {"a": "not joined", "b": "destroy did not finish"}, "c, which had left, is clean"
    assert "`shoal cluster destroy --cluster lab --yes` again when it can be" in half.remarks[-1]
    assert half.inventory is not None
    whole = await create(Paper(three()).crew(), half.inventory, Wishes())
    assert states(whole) == {"a": "joined", "b": "joined"}
    away = await create(paper.crew(), half.inventory, Wishes())
    assert states(away) == {"a": "joined", "b": "destroy did not finish"}
    assert (await destroy(Paper(three()).crew(), half.inventory, Wishes())).inventory is None


async def test_another_clusters_machine_is_left_alone_by_destroy() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory, never)
    paper.machines["10.0.0.2"] = PaperMachine(told("b", "10.0.0.2", "own cluster other"), never)
    await destroy(paper.crew(), inventory, Wishes())
    assert paper.machines["10.0.0.2"].seen == []


async def test_a_machine_that_never_comes_back_may_be_given_up() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    del paper.machines["10.0.0.2"]
    report = await destroy(paper.crew(), inventory, Wishes(is_forced=True))
    assert (report.inventory, report.gone) == (None, frozenset({"10.0.0.2"}))
    assert report.remarks == ["b did not answer: what Shoal put there stays there"]


async def test_jobs_that_are_in_the_way_are_told_once() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    paper.machines["10.0.0.1"].judge = lambda script: int("squeue" in script)
    crew = paper.crew()
    report = await remove(crew, inventory, [inventory.host("c")], Wishes())
    assert [line for outcome in crew.outcomes for line in told_by(outcome)] == []
    assert sum("it broke" in line for line in closing("lab", crew, report, 1.0, is_dry=False)) == 1


def stolen(*names: str) -> tuple[Paper, Inventory]:
    """A cluster, of which these machines are by now of another one that has the same name."""
    inventory = found(three(id=ID), facts_of(three().hosts))
    paper = Paper(inventory)
    for item in inventory.hosts:
        claim = f"own cluster lab {'6b' * 16 if item.label in names else ID}"
        text = told(item.label, item.address, claim, "own started slurmd", "own started slurmctld")
        paper.machines[item.address] = PaperMachine(text, never)
    return paper, inventory


async def test_a_cluster_of_the_same_name_is_neither_asked_nor_upgraded_nor_drained() -> None:
    paper, inventory = stolen("a")
    works: list[Callable[[Crew], Awaitable[Report]]] = [
        lambda crew: upgrade(crew, inventory, Wishes()),
        lambda crew: remove(crew, inventory, [inventory.host("c")], Wishes(is_forced=True)),
        lambda crew: destroy(crew, inventory, Wishes()),
    ]
    for work in works:
        with pytest.raises(
            EngineRefused, match="the controller, a, cannot be used: belongs to a cluster `lab`"
        ):
            await work(paper.crew())
    with pytest.raises(EngineRefused) as no:
        await destroy(paper.crew(), inventory, Wishes())
    assert (no.value.hint or "").startswith("`shoal cluster destroy --cluster lab --yes --force` leaves")
    assert [machine.seen for machine in paper.machines.values()] == [[], [], []]
    await destroy(paper.crew(), inventory, Wishes(is_forced=True))
    assert paper.machines["10.0.0.1"].seen == [], "its jobs are not ended either"


async def test_a_machine_that_another_cluster_has_by_now_is_left_alone_and_that_is_said() -> None:
    paper, inventory = stolen("c")
    await upgrade(paper.crew(), inventory, Wishes())
    _, smaller = await removed(paper, inventory, "c")
    assert labels(smaller) == ["a", "b"]
    paper.machines["10.0.0.1"].judge = lambda _: 0
    down = await destroy(paper.crew(), inventory, Wishes())
    assert down.inventory is None
    for report in (smaller, down):
        assert any(
            line.startswith("c is left alone: it belongs to a cluster `lab`") for line in report.remarks
        )
    assert paper.machines["10.0.0.3"].seen == []
