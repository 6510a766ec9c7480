"""Partitions, accounts and QOS: who may use which, and where a job goes. Without a Slurm."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from shoal.engines.fake import VirtualClock
from shoal.engines.remote.connection import ControlPlaneAccess
from shoal.engines.slurm.config import SlurmConfig, partition_rights, usable_partitions
from shoal.engines.slurm.engine import SlurmEngine
from shoal.engines.slurm.nodes import RawNode, slurm_nodes
from shoal.engines.slurm.parse import (
    SlurmFacts,
    parse_associations,
    parse_minutes,
    parse_partitions,
)
from shoal.engines.slurm.partitions import (
    Association,
    Partition,
    PartitionRights,
    UsablePartitions,
    choose_partition,
    exclusion_reason,
    find_usable,
    parse_choice,
    refuse_unknown_associations,
    shortened_time_limit,
    time_argument,
)
from shoal.engines.slurm.render import job_request, sbatch_arguments
from shoal.errors import EngineRefused, EngineUnreachable, SpecError
from shoal.wire import LaunchRequest, TaskSpec
from tests.support.slurm.fake_slurm import FakeSlurm, engine_on, slurm_task_spec
from tests.unit.engines.slurm.test_slurm_parse_and_render import GOLDEN

LINE = (
    "PartitionName={name} AllowGroups={groups} AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL "
    "Default={default} QoS=N/A DefaultTime={default_time} DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 "
    "Hidden={hidden} MaxNodes={max_nodes} MaxTime={max_time} MinNodes=0 LLN=NO Nodes=n[0-1] "
    "PriorityJobFactor=1 PriorityTier={tier} RootOnly=NO ReqResv=NO OverSubscribe=NO OverTimeLimit=NONE "
    "PreemptMode=OFF State={state} TotalCPUs=8 TotalNodes=2 SelectTypeParameters=NONE JobDefaults=(null) "
    "DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=8,mem=16000M,node=2,billing=8"
)
PLAIN = {
    "groups": "ALL",
    "default": "NO",
    "default_time": "NONE",
    "hidden": "NO",
    "max_nodes": "UNLIMITED",
    "max_time": "UNLIMITED",
    "tier": "1",
    "state": "UP",
}
NODES_OF = {"n0": ("main", "all"), "n1": ("main", "all"), "n2": ("gpu", "all"), "n3": ("gpu", "all")}
ANYBODY = (PartitionRights(),)


def told(name: str, **more: str) -> Partition:
    [result] = parse_partitions(LINE.format(name=name, **(PLAIN | more)))
    return result


def gang(*nodes: str, **more: object) -> tuple[TaskSpec, ...]:
    return tuple(
        slurm_task_spec(node=node, node_rank=rank, nodes=nodes, gpu_ids=(), **more)
        for rank, node in enumerate(nodes)
    )


def test_a_partition_is_read() -> None:
    short = told(
        "short", default="YES", default_time="01:00:00", max_time="1-00:30:00", max_nodes="2", tier="5"
    )
    assert (short.is_default, short.has_default_time, short.max_minutes) == (True, True, 1470)
    assert (short.max_nodes, short.tier, short.is_up, short.groups) == (2, 5, True, ())
    assert told("long") == Partition(name="long")
    assert told("ours", groups="staff,vision", hidden="YES", state="DRAIN") == Partition(
        name="ours", groups=("staff", "vision"), is_hidden=True, state="DRAIN"
    )
    assert [parse_minutes(text) for text in ("30:00", "02:00:01", "2-00:00:00", "UNLIMITED", "")] == [
        30,
        121,
        2880,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("partitions", "named", "first"),
    [
        ([Partition(name="gpu"), Partition(name="main", is_default=True)], (), "main"),
        ([Partition(name="gpu", tier=9), Partition(name="main")], (), "gpu"),
        ([Partition(name="gpu"), Partition(name="all")], (), "all"),  # the largest
        ([Partition(name="gpu"), Partition(name="main", is_default=True)], ("gpu", "main"), "gpu"),
    ],
)
def test_one_order_decides_which_partition_of_a_node_jobs_go_to_first(
    partitions: list[Partition], named: tuple[str, ...], first: str
) -> None:
    assert find_usable(partitions, NODES_OF, named, ANYBODY).usable[0].name == first


@pytest.mark.parametrize(
    ("partition", "rights", "why"),
    [
        (Partition(name="p", is_hidden=True), PartitionRights(), "hidden"),
        (Partition(name="p", is_root_only=True), PartitionRights(), "for root alone"),
        (Partition(name="p", is_root_only=True), PartitionRights(is_root=True), ""),
        (Partition(name="p", needs_reservation=True), PartitionRights(), "with a reservation alone"),
        (Partition(name="p", max_nodes=0), PartitionRights(), "MaxNodes=0"),
        (
            Partition(name="p", groups=("staff",)),
            PartitionRights(groups=frozenset({"ana"})),
            "for groups staff alone",
        ),
        (Partition(name="p", groups=("staff",)), PartitionRights(groups=frozenset({"ana", "staff"})), ""),
        (
            Partition(name="p", groups=("staff",)),
            PartitionRights(groups=frozenset({"root"}), is_root=True),
            "",
        ),
        (
            Partition(name="p", groups=("staff",)),
            PartitionRights(),
            "",
        ),  # nobody knows the groups: Slurm says
        (
            Partition(name="p", accounts=("vision",)),
            PartitionRights(account="nlp"),
            "not for account `nlp`, but for vision",
        ),
        (Partition(name="p", accounts=("vision",)), PartitionRights(), ""),
        (
            Partition(name="p", denied_accounts=("nlp",)),
            PartitionRights(account="nlp"),
            "not for account `nlp`",
        ),
        # As in Slurm, who allows some denies none of them.
        (
            Partition(name="p", accounts=("nlp",), denied_accounts=("nlp",)),
            PartitionRights(account="nlp"),
            "",
        ),
        (
            Partition(name="p", qos=("high",)),
            PartitionRights(qos="normal"),
            "not for qos `normal`, but for high",
        ),
        (Partition(name="p", denied_qos=("normal",)), PartitionRights(qos="normal"), "not for qos `normal`"),
    ],
)
def test_a_partition_that_jobs_may_not_go_to_is_left_out_in_words(
    partition: Partition, rights: PartitionRights, why: str
) -> None:
    message = exclusion_reason(partition, rights)
    assert why in message
    assert bool(message) == bool(why)
    parts = find_usable([partition], {"n0": ("p",)}, (), (rights,))
    assert (parts.usable == ()) == bool(why)
    assert parts.excluded == ({"p": message} if why else {})


def test_a_hidden_partition_is_used_by_who_names_it() -> None:
    hidden = Partition(name="p", is_hidden=True)
    assert find_usable([hidden], {"n0": ("p",)}, ("p",), ANYBODY).usable == (hidden,)


def test_what_one_project_may_use_is_there_for_it_alone() -> None:
    config = SlurmConfig(account="nlp", accounts={"vision": "v"})
    facts, raw = SlurmFacts(), [RawNode(name="n0", address="n0", states=frozenset(), partitions=("p",))]
    parts = usable_partitions(config, facts, [Partition(name="p", accounts=("v",))], raw)
    nodes_of, task_specs = {"n0": ("p",)}, gang("n0")
    assert (
        choose_partition(parts, nodes_of, task_specs, partition_rights(config, facts, "vision")).name == "p"
    )
    with pytest.raises(EngineRefused, match="`p` is not for account `nlp`, but for v"):
        choose_partition(parts, nodes_of, task_specs, partition_rights(config, facts, "default"))


MAIN = Partition(name="main", is_default=True, max_minutes=60, max_nodes=2)
GPU, ALL = Partition(name="gpu"), Partition(name="all", tier=0)
PARTS = find_usable([MAIN, GPU, ALL], NODES_OF, (), ANYBODY)


@pytest.mark.parametrize(
    ("orders", "goes_to"),
    [
        (gang("n0", "n1", time_limit_s=60.0), "main"),
        (gang("n2"), "gpu"),
        (gang("n0", "n2"), "all"),  # the only one that holds both
        (gang("n0", time_limit_s=7200.0), "all"),  # longer than `main` has
        (gang("n0", time_limit_s=3600.0), "main"),  # exactly what it has
        (gang("n0", time_limit_s=60.0, require={"partition.all": "yes"}), "all"),
        (gang("n0", time_limit_s=60.0, require={"pool": "main"}), "main"),
        (gang("elsewhere"), ""),  # of which Slurm has not told: it may know
    ],
)
def test_a_job_goes_to_the_first_partition_that_holds_its_nodes_and_takes_it(
    orders: tuple[TaskSpec, ...], goes_to: str
) -> None:
    partition = choose_partition(PARTS, NODES_OF, orders, PartitionRights())
    assert partition.name == goes_to
    request = job_request(SlurmConfig(), orders, {}, "o", "", partition)
    assert request.partition == goes_to


def test_a_job_that_no_partition_takes_is_refused_in_words() -> None:
    apart = find_usable([MAIN, GPU], {"n0": ("main",), "n2": ("gpu",)}, (), ANYBODY)
    with pytest.raises(EngineRefused, match="n0 in main; n2 in gpu") as refused:
        choose_partition(apart, {"n0": ("main",), "n2": ("gpu",)}, gang("n0", "n2"), PartitionRights())
    assert refused.value.hint == "set `topology: pool` in the job"
    alone = find_usable([MAIN], {}, (), ANYBODY)
    nodes_of = dict.fromkeys(("n0", "n1", "n2"), ("main",))
    with pytest.raises(
        EngineRefused, match="`main` takes jobs of up to 60 min, and its `time_limit` is longer"
    ):
        choose_partition(alone, nodes_of, gang("n0", time_limit_s=3601.0), PartitionRights())
    with pytest.raises(EngineRefused, match="`main` takes jobs of up to 2 nodes, and it has 3"):
        choose_partition(alone, nodes_of, gang("n0", "n1", "n2"), PartitionRights())


def test_a_job_waits_for_a_partition_that_is_down_unless_another_takes_it() -> None:
    down = msgspec.structs.replace(MAIN, state="DOWN")
    with pytest.raises(EngineUnreachable, match="partition `main` is DOWN"):
        choose_partition(
            find_usable([down], NODES_OF, ("main",), ANYBODY), NODES_OF, gang("n0"), PartitionRights()
        )
    assert (
        choose_partition(
            find_usable([down, ALL], NODES_OF, (), ANYBODY), NODES_OF, gang("n0"), PartitionRights()
        ).name
        == "all"
    )


def test_a_node_takes_no_work_while_all_its_partitions_are_closed() -> None:
    raw = [
        RawNode(name=name, address=name, states=frozenset({"IDLE"}), partitions=partitions)
        for name, partitions in (*NODES_OF.items(), ("n4", ("closed",)), ("n5", ()), ("n6", ("staff",)))
    ]
    there = [
        MAIN,
        GPU,
        ALL,
        Partition(name="closed", state="INACTIVE"),
        Partition(name="staff", is_hidden=True),
    ]
    result = {node.facts.name: node.facts for node in slurm_nodes(raw, {}, parts_of_all(there, raw))}
    assert {name: facts.pool for name, facts in result.items()} == {
        "n0": "main",
        "n1": "main",
        "n2": "gpu",
        "n3": "gpu",
        "n4": "closed",
    }
    assert [name for name, facts in result.items() if not facts.is_alive] == ["n4"]
    assert result["n4"].closed.endswith(" in Slurm")
    assert result["n4"].remarks == ("Slurm says partition `closed` is INACTIVE",)
    assert result["n2"].labels == {"partition.gpu": "yes", "partition.all": "yes"}


def parts_of_all(there: list[Partition], raw: list[RawNode]) -> UsablePartitions:
    return usable_partitions(SlurmConfig(), SlurmFacts(), there, raw)


@pytest.mark.parametrize(
    ("limit_s", "partition", "minutes"),
    [
        (None, Partition(name="p", has_default_time=True, max_minutes=1440), "1440"),
        (None, Partition(name="p", has_default_time=True), "UNLIMITED"),
        (None, Partition(name="p", max_minutes=1440), ""),  # Slurm gives the most by itself
        (3600.0, Partition(name="p", has_default_time=True, max_minutes=1440), "62"),
        (86400.0, Partition(name="p", max_minutes=1440), "1440"),  # our own margin is not worth a refusal
    ],
)
def test_the_time_of_the_chosen_partition_is_asked_for(
    limit_s: float | None, partition: Partition, minutes: str
) -> None:
    assert time_argument(slurm_task_spec(time_limit_s=limit_s, grace_s=0.0).resources, partition) == minutes


@pytest.mark.parametrize(
    ("limit_s", "max_minutes", "given_s"),
    [
        (3600.0, 60, 3450.0),  # the grace of 30 s, and two minutes, before Slurm would
        (3451.0, 60, 3450.0),
        (3450.0, 60, None),
        (3600.0, None, None),
        (None, 60, None),
        (120.0, 2, 60.0),
    ],
)
def test_shoal_ends_a_job_before_its_partition_does(
    limit_s: float | None, max_minutes: int | None, given_s: float | None
) -> None:
    partition = Partition(name="p", max_minutes=max_minutes)
    assert (
        shortened_time_limit(slurm_task_spec(time_limit_s=limit_s, grace_s=30.0).resources, partition)
        == given_s
    )


async def test_node_agents_get_the_time_limit_of_their_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm()
    main = Partition(name="main", is_default=True, max_minutes=60)
    monkeypatch.setattr(slurm, "partitions", lambda: [main])
    launch_request = LaunchRequest(attempt_id="att_1", urls=("https://a:1",), ca="", bootstrap_token="t")
    task_specs = (slurm_task_spec(nodes=("n0",), gpu_ids=(), time_limit_s=3600.0, grace_s=30.0),)
    await engine_on(tmp_path, VirtualClock(), slurm).launch(launch_request, task_specs)
    assert slurm.request.time == "60"
    assert '"time_limit_s":3450.0' in slurm.request.script


def test_what_slurm_is_told_of_a_job_in_two_partitions_that_asks_for_more_is_the_golden_file() -> None:
    config = SlurmConfig(account="shared", accounts={"vision": "v-2026"}, project_qos={"vision": "high"})
    require = {"partition.all": "yes", "gres.nvme": "yes", "feature.fast": "yes"}
    task_specs = gang("n0", "n2", project="vision", require=require, time_limit_s=None)
    longest = msgspec.structs.replace(ALL, has_default_time=True, max_minutes=2880)
    partition = choose_partition(
        find_usable([MAIN, longest], NODES_OF, (), ANYBODY), NODES_OF, task_specs, PartitionRights()
    )
    text = (
        "\n".join(
            ["sbatch", *sbatch_arguments(job_request(config, task_specs, {}, "/dev/null", "", partition))]
        )
        + "\n"
    )
    if os.environ.get("SHOAL_GOLDEN") == "write":
        (GOLDEN / "across-partitions.txt").write_text(text)
    assert text == (GOLDEN / "across-partitions.txt").read_text()


class TwoPartitions(FakeSlurm):
    states: tuple[str, ...] = ("UP", "UP")

    def nodes(self) -> list[RawNode]:
        return [
            RawNode(name=name, address=name, states=frozenset({"IDLE"}), partitions=(partition,))
            for name, partition in (("n0", "main"), ("n1", "main"), ("n2", "gpu"))
        ]

    def partitions(self) -> list[Partition]:
        main, gpu = self.states
        return [Partition(name="main", is_default=True, state=main), Partition(name="gpu", state=gpu)]


@pytest.mark.anyio
async def test_every_submission_names_the_partition_of_its_nodes(tmp_path: Path) -> None:
    slurm, reach = TwoPartitions(), ControlPlaneAccess(urls=("https://login:1",), ca="ca")
    engine = SlurmEngine(tmp_path, clock=VirtualClock(), access=reach, config=SlurmConfig(), transport=slurm)
    assert {facts.name: facts.pool for facts in await engine.nodes()} == {
        "n0": "main",
        "n1": "main",
        "n2": "gpu",
    }
    launch_request = LaunchRequest(
        attempt_id="att_1", urls=("https://login:1",), ca="ca", bootstrap_token="t"
    )
    for nodes, partition in ((("n0", "n1"), "main"), (("n2",), "gpu")):
        await engine.launch(launch_request, gang(*nodes))
        assert slurm.request.partition == partition
    with pytest.raises(EngineRefused, match="Slurm runs no job in two"):
        await engine.launch(launch_request, gang("n0", "n2"))
    pools = {"main", "gpu"}
    assert engine.common_label({}, {"main"}) is None
    assert engine.common_label({}, pools) == "pool"
    assert engine.common_label({"feature.fast": "yes"}, pools) == "pool"
    assert engine.common_label({"partition.all": "yes"}, pools) is None
    assert engine.common_label({"pool": "gpu"}, pools) is None


def test_associations_are_read_and_what_the_user_has_not_is_refused_with_the_nearest() -> None:
    text = "vision|nlp||normal|normal\nvision|vision|gpu||high,normal\n|||\n"
    expected = parse_associations(text)
    assert expected == [
        Association(account="nlp", default_qos="normal", qos=("normal",)),
        Association(account="vision", is_default=True, partition="gpu", qos=("high", "normal")),
    ]
    refuse_unknown_associations(expected, ["nlp", "vision"], ["high"])
    with pytest.raises(SpecError, match="no account `vison`; there is nlp, vision") as refused:
        refuse_unknown_associations(expected, ["vison"], [])
    assert refused.value.hint == "did you mean `--account vision`?"
    with pytest.raises(SpecError, match="no QOS `urgent`; there is high, normal"):
        refuse_unknown_associations(expected, [], ["urgent"])
    refuse_unknown_associations([], ["anything"], ["at all"])  # no accounting: Slurm alone knows


def test_accounts_are_for_all_or_by_project() -> None:
    assert parse_choice("--account", "") == ("", {})
    assert parse_choice("--account", "v") == ("v", {})
    assert parse_choice("--account", "v,nlp=n,vision=w") == ("v", {"nlp": "n", "vision": "w"})
    for text in ("a,b", "=x", "nlp="):
        with pytest.raises(SpecError, match="PROJECT=NAME"):
            parse_choice("--account", text)
