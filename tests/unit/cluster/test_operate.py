"""Create, add and upgrade over machines on paper: who fails is reported, the rest goes on."""

from __future__ import annotations

import base64

import anyio
import pytest

from shoal.cli.cluster_words import closing
from shoal.cluster.facts import read_facts
from shoal.cluster.inventory import Found, Host
from shoal.cluster.machine import Answer
from shoal.cluster.operate import Report, Wishes, add, create, upgrade
from shoal.cluster.run import Crew, Outcome, State
from shoal.errors import EngineRefused
from tests.support.bare_machines import (
    NOW,
    PART,
    Paper,
    PaperMachine,
    facts_of,
    found,
    host,
    never,
    three,
    told,
    wrong,
)

AS_ROOT = PaperMachine.as_root


async def test_everything_that_is_so_already_is_left_alone() -> None:
    paper = Paper(three())
    crew = paper.crew()
    report = await create(crew, three(), Wishes())
    assert (crew.num_changed, crew.failed) == (0, {})
    assert all(not stdin for machine in paper.machines.values() for _, stdin in machine.seen)
    assert report.inventory == found(three(), crew.facts)


async def test_bare_machines_are_changed_step_by_step() -> None:
    paper = Paper(three(), never)
    crew = paper.crew()
    await create(crew, three(), Wishes())
    assert crew.failed == {}
    assert {outcome.state for outcome in crew.outcomes} == {State.CHANGED}


async def test_a_dry_run_sends_no_change() -> None:
    paper = Paper(three(), lambda _: 1)
    crew = paper.crew(is_dry=True)
    await create(crew, three(), Wishes())
    assert {outcome.state for outcome in crew.outcomes} == {State.WOULD_CHANGE}
    scripts = [script for machine in paper.machines.values() for script, _ in machine.seen]
    assert [script for script in scripts if "&& echo yes || echo no" not in script] == []


async def test_a_worker_that_fails_before_it_joins_is_not_declared_and_the_rest_goes_on() -> None:
    paper = Paper(three(), never)
    paper.machines["10.0.0.2"].judge = lambda _: 1
    crew = paper.crew()
    report = await create(crew, three(), Wishes())
    assert list(wrong(crew)) == ["b"]
    assert crew.failed["10.0.0.2"].detail == "it broke"
    way = crew.machines["10.0.0.2"].typed
    assert crew.failed["10.0.0.2"].hint.startswith(f"see for yourself with `{way}`"), "as we logged in"
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts if item.found] == ["a", "c"]
    sent = [stdin for _, stdin in paper.machines["10.0.0.1"].seen if b"ClusterName" in stdin]
    assert [b"NodeName=b " in text for text in sent] == [False]


async def test_a_member_that_is_away_stays_declared() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory, never)
    del paper.machines["10.0.0.3"]
    crew = paper.crew()
    report = await create(crew, inventory, Wishes())
    assert list(wrong(crew)) == ["c"]
    sent = [stdin for _, stdin in paper.machines["10.0.0.1"].seen if b"ClusterName" in stdin]
    assert [b"NodeName=c " in text for text in sent] == [True]
    assert report.inventory == inventory


async def test_who_is_told_to_give_a_machine_another_name_may_do_it() -> None:
    paper = Paper(three(), never)
    paper.machines["10.0.0.2"] = PaperMachine(told("b_b", "10.0.0.2"), never)
    crew = paper.crew()
    await create(crew, three(), Wishes())
    assert crew.failed["10.0.0.2"].hint == f"{AS_ROOT} hostnamectl set-hostname NAME"


@pytest.mark.parametrize("when", ["unreachable", "at the first step"])
async def test_without_a_controller_there_is_no_cluster(when: str) -> None:
    paper = Paper(three(), never)
    if when == "unreachable":
        del paper.machines["10.0.0.1"]
    else:
        paper.machines["10.0.0.1"].judge = lambda _: 1
    with pytest.raises(EngineRefused, match="the controller"):
        await create(paper.crew(), three(), Wishes())
    assert not any(b"ClusterName" in stdin for m in paper.machines.values() for _, stdin in m.seen)


async def test_a_connection_that_breaks_is_a_failure_of_that_machine_alone() -> None:
    paper = Paper(three(), never)

    def break_off(script: str) -> int:
        paper.machines["10.0.0.2"].is_lost = True
        return never(script)

    paper.machines["10.0.0.2"].judge = break_off
    crew = paper.crew()
    await create(crew, three(), Wishes())
    assert crew.failed["10.0.0.2"].detail == "the connection was lost"
    assert list(wrong(crew)) == ["b"]


async def test_the_cluster_keeps_its_key_and_a_key_that_cannot_be_read_is_not_replaced() -> None:
    inventory = found(three(), facts_of(three().hosts))
    more = ("file /etc/munge/munge.key 11", "own files 11 /etc/munge/munge.key", "own cluster lab")
    paper = Paper(inventory, never)

    class Keeper(PaperMachine):
        async def run(self, script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> Answer:
            if script.startswith("base64 "):
                return Answer(0, base64.b64encode(b"the old key").decode(), "")
            return await super().run(script, stdin, timeout_s)

    first = told("a", "10.0.0.1", *more)
    paper.machines["10.0.0.1"] = Keeper(first, never)
    await create(paper.crew(), inventory, Wishes())
    sent = [stdin for s, stdin in paper.machines["10.0.0.3"].seen if "cat >/etc/munge/munge.key" in s]
    assert sent == [b"the old key"]

    paper = Paper(inventory, never)
    paper.machines["10.0.0.1"] = PaperMachine(first, lambda _: 1)
    with pytest.raises(EngineRefused, match="did not give the cluster's secret") as no:
        await create(paper.crew(), inventory, Wishes())
    assert no.value.hint == f"{AS_ROOT} ls -l /etc/munge/munge.key", "no secret on the screen"


async def test_machines_that_cannot_join_stay_out_of_the_inventory() -> None:
    inventory = found(three(), facts_of(three().hosts))
    new = (host("d", 4), host("e", 5))
    paper = Paper(inventory.with_hosts([*inventory.hosts, *new]), never)
    paper.machines["10.0.0.5"].judge = lambda _: 1
    crew = paper.crew()
    report = await add(crew, inventory, new, Wishes())
    assert report.inventory is not None
    assert [item.label for item in report.inventory.hosts] == ["a", "b", "c", "d"]
    assert list(wrong(crew)) == ["e"]


async def test_a_machine_that_is_away_without_cgroups_keeps_the_others_from_relying_on_them() -> None:
    facts = facts_of(three().hosts)
    inventory = three()
    facts["10.0.0.3"] = read_facts(told("c", "10.0.0.3", without="cgroup"), inventory.hosts[2])
    inventory = found(inventory, facts)
    new = host("d", 4)
    paper = Paper(inventory.with_hosts([*inventory.hosts, new]), never)
    del paper.machines["10.0.0.3"]
    report = await add(paper.crew(), inventory, [new], Wishes())
    sent = {stdin for m in paper.machines.values() for _, stdin in m.seen if b"ClusterName" in stdin}
    assert [b"ProctrackType=proctrack/linuxproc\n" in text for text in sent] == [True]
    assert "not every machine answered" in " ".join(report.remarks)


def test_the_first_failure_of_a_machine_is_the_one_told() -> None:
    crew = Paper(three()).crew()
    for detail in ("first", "second"):
        crew.note(Outcome("10.0.0.1", "a", "step", State.FAILED, detail))
    assert crew.failed["10.0.0.1"].detail == "first"


async def test_a_machine_that_somebody_else_is_changing_is_not_touched() -> None:
    paper = Paper(three(), never)
    paper.machines["10.0.0.3"].holder = "bo@desktop"
    crew = paper.crew()
    await create(crew, three(), Wishes())
    assert "is being changed by bo@desktop" in crew.failed["10.0.0.3"].detail
    assert crew.failed["10.0.0.3"].hint.endswith(f"{AS_ROOT} kill that process")
    assert paper.machines["10.0.0.3"].seen == []
    looking = paper.crew(is_dry=True)
    await create(looking, three(), Wishes())
    assert looking.failed == {}


async def test_no_worker_becomes_newer_than_a_controller_whose_upgrade_failed() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory, lambda script: int("--only-upgrade" in script))
    with pytest.raises(EngineRefused, match="failed at `newest packages"):
        await upgrade(paper.crew(), inventory, Wishes())
    assert [m.seen for a, m in paper.machines.items() if a != "10.0.0.1"] == [[], []]


async def test_what_takes_long_is_told_while_it_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cluster.run.SAY_AFTER_S", 0.01)
    heard: list[Outcome] = []
    paper = Paper(three(), never)
    machine = paper.machines["10.0.0.2"]
    answer = machine.run

    async def slowly(script: str, stdin: bytes = b"", timeout_s: float = 120.0) -> Answer:
        if "apt-get" in script:
            await anyio.sleep(0.1)
        return await answer(script, stdin, timeout_s)

    monkeypatch.setattr(machine, "run", slowly)
    crew = Crew(paper.connect, heard.append, lambda: NOW, lambda _, __: PART)
    await create(crew, three(), Wishes())
    told_ = [outcome.title for outcome in heard if outcome.state is State.UNDER_WAY and outcome.label == "b"]
    assert told_[0].startswith("packages munge")
    assert State.UNDER_WAY not in {outcome.state for outcome in crew.outcomes}


@pytest.mark.parametrize("is_dry", [False, True])
async def test_a_shared_directory_that_is_not_there_is_told_before_anything_is_changed(
    *, is_dry: bool
) -> None:
    inventory = three().model_copy(update={"shared": "/srv/sharde"})
    paper = Paper(inventory, never)
    crew = paper.crew(is_dry=is_dry)
    with pytest.raises(
        EngineRefused, match=r"the controller, .*: there is no directory /srv/sharde on a"
    ) as no:
        await create(crew, inventory, Wishes())
    assert "--shared DIR" in (no.value.hint or "")
    assert (crew.num_changed, len(crew.failed)) == (0, 3)


async def test_of_a_member_whose_shared_directory_is_away_the_rest_is_brought_up_to_date() -> None:
    inventory = found(three(), facts_of(three().hosts)).model_copy(update={"shared": "/srv/shared"})
    paper = Paper(inventory)
    paper.machines["10.0.0.3"].judge = lambda script: int("/srv/shared" in script)
    crew = paper.crew()
    await create(crew, inventory, Wishes())
    assert wrong(crew) == {"c": "/srv/shared is the controller's"}


async def test_a_replacement_with_the_name_of_a_dead_machine_is_refused_before_anything_is_changed() -> None:
    inventory = found(three(), facts_of(three().hosts))
    paper = Paper(inventory)
    del paper.machines["10.0.0.2"]
    paper.machines["10.0.0.9"] = PaperMachine(told("b", "10.0.0.9"), never)
    crew = paper.crew()
    report = await add(crew, inventory, [Host(address="10.0.0.9")], Wishes())
    assert report.inventory == inventory
    assert "`shoal cluster remove b --cluster lab` first" in crew.failed["10.0.0.9"].detail
    assert paper.machines["10.0.0.9"].seen == []


GPUS = tuple(f"gpu {index} Disabled NVIDIA H200" for index in range(2))
DEVICES = ("device /dev/nvidia0", "device /dev/nvidia1")


async def seen_again(
    *now: str, name: str = "c", joined: tuple[str, ...] = GPUS, as_found: str = ""
) -> tuple[Crew, Report, Found]:
    """A cluster that is asked again, and what is declared of c, which now tells this of itself."""
    inventory = found(three(), facts_of(three().hosts, {"c": joined}))
    nameless = inventory.hosts[2].model_copy(update={"name": None})
    inventory = inventory.with_hosts([*inventory.hosts[:2], nameless])
    paper = Paper(inventory)
    paper.machines["10.0.0.3"] = PaperMachine(told(name, "10.0.0.3", *now))
    crew = paper.crew()
    report = await create(crew, inventory, Wishes(as_found=frozenset({as_found})))
    assert report.inventory is not None
    declared = report.inventory.hosts[2].found
    assert declared is not None
    return crew, report, declared


@pytest.mark.parametrize(
    ("now", "shown"),
    [
        (GPUS[:1], "GPUs: 1 h200"),
        (DEVICES, "GPUs: 2 of no known kind"),
        ((), "no GPU"),
        (("gpu 0 Disabled NVIDIA L4", GPUS[1]), "GPUs: 1 l4, 1 h200"),
    ],
)
async def test_a_member_that_lost_a_gpu_stays_declared_with_it_until_somebody_says_otherwise(
    now: tuple[str, ...], shown: str
) -> None:
    crew, report, declared = await seen_again(*now)
    assert [(gpus.kind, len(gpus.files)) for gpus in declared.gpus] == [("h200", 2)]
    (doubt,) = crew.doubts
    assert doubt.startswith(f"c shows {shown} and stays declared with GPUs: 2 h200, as it joined")
    assert doubt.endswith("if it is to be so, `shoal cluster create --name lab --as-found c`")
    assert any("--as-found c" in line for line in closing("lab", crew, report, 1, is_dry=False))
    crew, _, declared = await seen_again(*now, as_found="10.0.0.3")
    assert [gpus.kind for gpus in declared.gpus] != ["h200"] or len(declared.gpus[0].files) == 1
    assert crew.doubts == []


async def test_a_member_that_has_more_than_it_had_is_declared_with_it() -> None:
    for joined in (GPUS[:1], DEVICES, ()):
        crew, _, declared = await seen_again(*GPUS, joined=joined)
        assert [(gpus.kind, len(gpus.files)) for gpus in declared.gpus] == [("h200", 2)]
        assert crew.doubts == []


async def test_a_member_that_was_renamed_keeps_its_name_until_somebody_says_otherwise() -> None:
    crew, _, declared = await seen_again(*GPUS, name="other")
    assert declared.hostname == "c"
    assert "c calls itself `other` and stays declared as `c`" in crew.doubts[0]
    assert "`hostnamectl set-hostname c` there" in crew.doubts[0]
    _, _, declared = await seen_again(*GPUS, name="other", as_found="10.0.0.3")
    assert declared.hostname == "other"
