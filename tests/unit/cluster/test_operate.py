"""Create, add and upgrade over fake machines: failures are reported, and the other machines continue."""

from __future__ import annotations

import base64

import anyio
import pytest

from shoal.cli.cluster.report import closing_lines
from shoal.cluster.facts import read_facts
from shoal.cluster.inventory import DetectedHardware, InventoryHost
from shoal.cluster.machine import ScriptResult
from shoal.cluster.operations import ClusterReport, OperationOptions, add, create, upgrade
from shoal.cluster.session import ClusterSession, StepOutcome, StepState
from shoal.errors import EngineRefused
from tests.support.fakes.machines import (
    ARCHIVE,
    NOW,
    FakeMachine,
    FakeMachines,
    facts_of,
    facts_text,
    failed_titles,
    host,
    only_changes_work,
    three_hosts,
    with_hardware,
)

AS_ROOT = FakeMachine.as_root


async def test_steps_already_done_are_left_alone() -> None:
    paper = FakeMachines(three_hosts())
    session = paper.session()
    report = await create(session, three_hosts(), OperationOptions())
    assert (session.num_changed, session.failed) == (0, {})
    assert all(not stdin for machine in paper.machines.values() for _, stdin in machine.scripts)
    assert report.inventory == with_hardware(three_hosts(), session.facts)


async def test_bare_machines_are_changed_step_by_step() -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)
    session = paper.session()
    await create(session, three_hosts(), OperationOptions())
    assert session.failed == {}
    assert {outcome.state for outcome in session.outcomes} == {StepState.CHANGED}


async def test_a_dry_run_sends_no_change() -> None:
    paper = FakeMachines(three_hosts(), lambda _: 1)
    session = paper.session(is_dry=True)
    await create(session, three_hosts(), OperationOptions())
    assert {outcome.state for outcome in session.outcomes} == {StepState.WOULD_CHANGE}
    scripts = [script for machine in paper.machines.values() for script, _ in machine.scripts]
    assert [script for script in scripts if "&& echo yes || echo no" not in script] == []


async def test_worker_that_fails_before_joining_is_not_declared() -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)
    paper.machines["10.0.0.2"].exit_code_of = lambda _: 1
    session = paper.session()
    report = await create(session, three_hosts(), OperationOptions())
    assert list(failed_titles(session)) == ["b"]
    assert session.failed["10.0.0.2"].detail == "it broke"
    way = session.machines["10.0.0.2"].typed
    assert session.failed["10.0.0.2"].hint.startswith(f"look there with `{way}`"), "as we logged in"
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts if item.hardware] == ["a", "c"]
    sent = [stdin for _, stdin in paper.machines["10.0.0.1"].scripts if b"ClusterName" in stdin]
    assert [b"NodeName=b " in text for text in sent] == [False]


async def test_a_member_that_is_away_stays_declared() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory, only_changes_work)
    del paper.machines["10.0.0.3"]
    session = paper.session()
    report = await create(session, inventory, OperationOptions())
    assert list(failed_titles(session)) == ["c"]
    sent = [stdin for _, stdin in paper.machines["10.0.0.1"].scripts if b"ClusterName" in stdin]
    assert [b"NodeName=c " in text for text in sent] == [True]
    assert report.inventory == inventory


async def test_rename_hint_has_the_command_prefix_for_root() -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)
    paper.machines["10.0.0.2"] = FakeMachine(facts_text("b_b", "10.0.0.2"), only_changes_work)
    session = paper.session()
    await create(session, three_hosts(), OperationOptions())
    assert session.failed["10.0.0.2"].hint == f"{AS_ROOT} hostnamectl set-hostname NAME"


@pytest.mark.parametrize("when", ["unreachable", "at the first step"])
async def test_without_a_controller_there_is_no_cluster(when: str) -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)
    if when == "unreachable":
        del paper.machines["10.0.0.1"]
    else:
        paper.machines["10.0.0.1"].exit_code_of = lambda _: 1
    with pytest.raises(EngineRefused, match="the controller"):
        await create(paper.session(), three_hosts(), OperationOptions())
    assert not any(b"ClusterName" in stdin for m in paper.machines.values() for _, stdin in m.scripts)


async def test_a_connection_that_breaks_is_a_failure_of_that_machine_alone() -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)

    def break_off(script: str) -> int:
        paper.machines["10.0.0.2"].is_lost = True
        return only_changes_work(script)

    paper.machines["10.0.0.2"].exit_code_of = break_off
    session = paper.session()
    await create(session, three_hosts(), OperationOptions())
    assert session.failed["10.0.0.2"].detail == "the connection was lost"
    assert list(failed_titles(session)) == ["b"]


async def test_the_cluster_keeps_its_key_and_a_key_that_cannot_be_read_is_not_replaced() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    more = ("file /etc/munge/munge.key 11", "own files 11 /etc/munge/munge.key", "own cluster lab")
    paper = FakeMachines(inventory, only_changes_work)

    class Keeper(FakeMachine):
        async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> ScriptResult:
            if script.startswith("base64 "):
                return ScriptResult(0, base64.b64encode(b"the old key").decode(), "")
            return await super().run(script, stdin, timeout_s)

    first = facts_text("a", "10.0.0.1", *more)
    paper.machines["10.0.0.1"] = Keeper(first, only_changes_work)
    await create(paper.session(), inventory, OperationOptions())
    sent = [stdin for s, stdin in paper.machines["10.0.0.3"].scripts if "cat >/etc/munge/munge.key" in s]
    assert sent == [b"the old key"]

    paper = FakeMachines(inventory, only_changes_work)
    paper.machines["10.0.0.1"] = FakeMachine(first, lambda _: 1)
    with pytest.raises(EngineRefused, match="the cluster's secret cannot be read") as no:
        await create(paper.session(), inventory, OperationOptions())
    assert no.value.hint == f"{AS_ROOT} ls -l /etc/munge/munge.key", "no secret on the screen"


async def test_machines_that_cannot_join_stay_out_of_the_inventory() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    new = (host("d", 4), host("e", 5))
    paper = FakeMachines(inventory.with_hosts([*inventory.hosts, *new]), only_changes_work)
    paper.machines["10.0.0.5"].exit_code_of = lambda _: 1
    session = paper.session()
    report = await add(session, inventory, new, OperationOptions())
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b", "c", "d"]
    assert list(failed_titles(session)) == ["e"]


async def test_a_machine_that_is_away_without_cgroups_keeps_the_others_from_relying_on_them() -> None:
    facts = facts_of(three_hosts().hosts)
    inventory = three_hosts()
    facts["10.0.0.3"] = read_facts(facts_text("c", "10.0.0.3", without="cgroup"), inventory.hosts[2])
    inventory = with_hardware(inventory, facts)
    new = host("d", 4)
    paper = FakeMachines(inventory.with_hosts([*inventory.hosts, new]), only_changes_work)
    del paper.machines["10.0.0.3"]
    report = await add(paper.session(), inventory, [new], OperationOptions())
    sent = {stdin for m in paper.machines.values() for _, stdin in m.scripts if b"ClusterName" in stdin}
    assert [b"ProctrackType=proctrack/linuxproc\n" in text for text in sent] == [True]
    assert "not every machine answered" in " ".join(report.remarks)


def test_first_failure_of_a_machine_is_reported() -> None:
    session = FakeMachines(three_hosts()).session()
    for detail in ("first", "second"):
        session.record(StepOutcome("10.0.0.1", "a", "step", StepState.FAILED, detail))
    assert session.failed["10.0.0.1"].detail == "first"


async def test_machine_locked_by_another_command_is_not_changed() -> None:
    paper = FakeMachines(three_hosts(), only_changes_work)
    paper.machines["10.0.0.3"].holder = "bo@desktop"
    session = paper.session()
    await create(session, three_hosts(), OperationOptions())
    assert "is being changed by bo@desktop" in session.failed["10.0.0.3"].detail
    assert session.failed["10.0.0.3"].hint.endswith(f"{AS_ROOT} kill that process")
    assert paper.machines["10.0.0.3"].scripts == []
    looking = paper.session(is_dry=True)
    await create(looking, three_hosts(), OperationOptions())
    assert looking.failed == {}


async def test_no_worker_becomes_newer_than_a_controller_whose_upgrade_failed() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory, lambda script: int("--only-upgrade" in script))
    with pytest.raises(EngineRefused, match="failed at `newest packages"):
        await upgrade(paper.session(), inventory, OperationOptions())
    assert [m.scripts for a, m in paper.machines.items() if a != "10.0.0.1"] == [[], []]


async def test_long_steps_are_reported_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.session.SAY_AFTER_S", 0.01)
    reported: list[StepOutcome] = []
    paper = FakeMachines(three_hosts(), only_changes_work)
    machine = paper.machines["10.0.0.2"]
    answer = machine.run

    async def slowly(script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> ScriptResult:
        if "apt-get" in script:
            await anyio.sleep(0.1)
        return await answer(script, stdin, timeout_s)

    monkeypatch.setattr(machine, "run", slowly)
    session = ClusterSession(paper.connect, reported.append, lambda: NOW, lambda _, __: ARCHIVE)
    await create(session, three_hosts(), OperationOptions())
    told_ = [
        outcome.title for outcome in reported if outcome.state is StepState.UNDER_WAY and outcome.label == "b"
    ]
    assert told_[0].startswith("packages munge")
    assert StepState.UNDER_WAY not in {outcome.state for outcome in session.outcomes}


@pytest.mark.parametrize("is_dry", [False, True])
async def test_missing_shared_directory_is_reported_before_any_change(*, is_dry: bool) -> None:
    inventory = three_hosts().model_copy(update={"shared": "/srv/sharde"})
    paper = FakeMachines(inventory, only_changes_work)
    session = paper.session(is_dry=is_dry)
    with pytest.raises(
        EngineRefused, match=r"the controller, .*: there is no directory /srv/sharde on a"
    ) as no:
        await create(session, inventory, OperationOptions())
    assert "--shared DIR" in (no.value.hint or "")
    assert (session.num_changed, len(session.failed)) == (0, 3)


async def test_member_without_its_shared_directory_is_still_updated() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts)).model_copy(
        update={"shared": "/srv/shared"}
    )
    paper = FakeMachines(inventory)
    paper.machines["10.0.0.3"].exit_code_of = lambda script: int("/srv/shared" in script)
    session = paper.session()
    await create(session, inventory, OperationOptions())
    assert failed_titles(session) == {"c": "/srv/shared is the controller's"}


async def test_a_replacement_with_the_name_of_a_dead_machine_is_refused_before_anything_is_changed() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    paper = FakeMachines(inventory)
    del paper.machines["10.0.0.2"]
    paper.machines["10.0.0.9"] = FakeMachine(facts_text("b", "10.0.0.9"), only_changes_work)
    session = paper.session()
    report = await add(session, inventory, [InventoryHost(address="10.0.0.9")], OperationOptions())
    assert report.inventory == inventory
    assert "`shoal cluster remove b --cluster lab` first" in session.failed["10.0.0.9"].detail
    assert paper.machines["10.0.0.9"].scripts == []


GPUS = tuple(f"gpu {index} Disabled NVIDIA H200" for index in range(2))
DEVICES = ("device /dev/nvidia0", "device /dev/nvidia1")


async def seen_again(
    *now: str, name: str = "c", joined: tuple[str, ...] = GPUS, as_found: str = ""
) -> tuple[ClusterSession, ClusterReport, DetectedHardware]:
    """Create the cluster again and return what is declared of c, which now reports this of itself."""
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts, {"c": joined}))
    nameless = inventory.hosts[2].model_copy(update={"name": None})
    inventory = inventory.with_hosts([*inventory.hosts[:2], nameless])
    paper = FakeMachines(inventory)
    paper.machines["10.0.0.3"] = FakeMachine(facts_text(name, "10.0.0.3", *now))
    session = paper.session()
    report = await create(session, inventory, OperationOptions(as_found=frozenset({as_found})))
    assert report.inventory is not None
    declared = report.inventory.hosts[2].hardware
    assert declared is not None
    return session, report, declared


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        (GPUS[:1], "GPUs: 1 h200"),
        (DEVICES, "GPUs: 2 of no known kind"),
        ((), "no GPU"),
        (("gpu 0 Disabled NVIDIA L4", GPUS[1]), "GPUs: 1 l4, 1 h200"),
    ],
)
async def test_member_that_lost_a_gpu_stays_declared_until_accepted(now: tuple[str, ...], shown: str) -> None:
    session, report, declared = await seen_again(*now)
    assert [(gpus.kind, len(gpus.files)) for gpus in declared.gpus] == [("h200", 2)]
    (doubt,) = session.warnings
    assert doubt.startswith(f"c shows {shown} and stays declared with GPUs: 2 h200, as it joined")
    assert doubt.endswith("to accept that, `shoal cluster create --name lab --as-found c`")
    assert any("--as-found c" in line for line in closing_lines("lab", session, report, 1, is_dry=False))
    session, _, declared = await seen_again(*now, as_found="10.0.0.3")
    assert [gpus.kind for gpus in declared.gpus] != ["h200"] or len(declared.gpus[0].files) == 1
    assert session.warnings == []


async def test_member_with_more_hardware_is_declared_with_it() -> None:
    for joined in (GPUS[:1], DEVICES, ()):
        session, _, declared = await seen_again(*GPUS, joined=joined)
        assert [(gpus.kind, len(gpus.files)) for gpus in declared.gpus] == [("h200", 2)]
        assert session.warnings == []


async def test_renamed_member_keeps_its_name_until_accepted() -> None:
    session, _, declared = await seen_again(*GPUS, name="other")
    assert declared.hostname == "c"
    assert "c calls itself `other` and stays declared as `c`" in session.warnings[0]
    assert "`hostnamectl set-hostname c` there" in session.warnings[0]
    _, _, declared = await seen_again(*GPUS, name="other", as_found="10.0.0.3")
    assert declared.hostname == "other"
