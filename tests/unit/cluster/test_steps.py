"""What may be touched, what is planned in which order, and what leaves with a machine."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shoal.cluster import render
from shoal.cluster.advice import firewall
from shoal.cluster.facts import CONTAINED, read_facts
from shoal.cluster.inventory import Host, Inventory, make
from shoal.cluster.leaving import leave, left_behind
from shoal.cluster.objections import MAX_SKEW_S, Takeover, misfits, objections, unlike_users
from shoal.cluster.steps import Stage, plan
from shoal.spec.job import JobSpec
from tests.support.bare_machines import ID, SECRETS, facts_of, found, host, parts_of, three, told

KEY = "file /etc/munge/munge.key 11"
OWN_KEY = "own files 11 /etc/munge/munge.key"


def objected(takeover: Takeover = Takeover.REFUSE, **more: tuple[str, ...]) -> dict[str, str]:
    inventory = three()
    found_ = objections(inventory, facts_of(inventory.hosts, dict(more)), takeover)
    return {inventory.host(address).label: "; ".join(lines) for address, lines in found_.items()}


def test_bare_machines_may_be_touched() -> None:
    assert objected() == {}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (KEY, "munge.key that was there before Shoal"),
        ("file /etc/slurm/slurm.conf 22", "slurm.conf that was there before Shoal"),
        ("own cluster other", "belongs to cluster `other`"),
    ],
)
def test_what_was_there_before_is_not_touched_unasked(line: str, words: str) -> None:
    assert list(objected(b=(line,))) == ["b"]
    assert words in objected(b=(line,))["b"]


@pytest.mark.parametrize(
    ("claim", "is_refused"),
    [("lab", False), (f"lab {ID}", False), (f"lab {'6b' * 16}", True), (f"other {ID}", True)],
)
def test_a_machine_of_another_cluster_of_the_same_name_is_not_touched(
    claim: str, *, is_refused: bool
) -> None:
    inventory = three(id=ID)
    facts = facts_of(inventory.hosts, {"b": (f"own cluster {claim}",)})
    told_ = objections(inventory, facts, Takeover.REPLACE)
    assert list(told_) == (["10.0.0.2"] if is_refused else [])
    if claim.startswith("lab") and is_refused:
        assert f"put `id: {'6b' * 16}` into clusters/lab.yaml of this home" in told_["10.0.0.2"][0]
        assert list(objections(three(), facts, Takeover.REPLACE)) == ["10.0.0.2"], "an inventory without id"


def test_a_machine_of_a_cluster_that_is_gone_can_be_freed_by_hand() -> None:
    """It was off while its cluster was destroyed by force: no inventory has its id any more."""
    inventory = three(id=ID)
    left = ("own made names", KEY, OWN_KEY)
    facts = facts_of(inventory.hosts, {"b": (f"own cluster lab {'6b' * 16}", *left)})
    (told_,) = objections(inventory, facts, Takeover.REFUSE)["10.0.0.2"]
    assert "was made by another inventory" in told_
    assert "if that cluster is gone, `rm /var/lib/shoal-cluster/cluster` on it" in told_
    assert objections(inventory, facts_of(inventory.hosts, {"b": left}), Takeover.REFUSE) == {}


def test_what_shoal_wrote_may_be_written_again_unless_somebody_changed_it() -> None:
    assert objected(b=(KEY, OWN_KEY)) == {}
    changed = objected(b=("file /etc/munge/munge.key 12", OWN_KEY))
    assert "was changed since Shoal wrote it" in changed["b"]


def test_a_key_that_our_own_package_made_is_nobodys() -> None:
    """A first run was cut off between the package and the key."""
    assert objected(b=(KEY, "own cluster lab", "own packages munge")) == {}
    changed = objected(b=("file /etc/munge/munge.key 12", OWN_KEY, "own packages munge"))
    assert "was changed since Shoal wrote it" in changed["b"]


def test_a_key_may_be_kept_if_no_machine_has_another() -> None:
    assert objected(Takeover.KEEP, a=(KEY,)) == {}
    assert objected(Takeover.KEEP, a=(KEY,), b=(KEY,)) == {}
    assert list(objected(Takeover.KEEP, a=(KEY,), b=("file /etc/munge/munge.key 12",))) == ["b"]
    assert list(objected(Takeover.KEEP, b=("file /etc/slurm/slurm.conf 22",))) == ["b"]
    assert objected(Takeover.REPLACE, a=(KEY,), b=("file /etc/munge/munge.key 12",)) == {}


def test_a_key_that_only_a_worker_has_is_not_replaced_by_who_said_keep() -> None:
    told_ = objected(Takeover.KEEP, b=(KEY,))
    assert list(told_) == ["a", "b"], "nothing is made: afterwards the controller could not be another"
    assert "has no /etc/munge/munge.key that `--existing keep` could spread, and b has one" in told_["a"]
    assert "`--controller 10.0.0.2`" in told_["a"]
    assert objected(Takeover.KEEP, b=(KEY, "own packages munge")) == {}
    assert objected(Takeover.REPLACE, b=(KEY,)) == {}


def test_a_database_that_is_not_ours_is_not_touched_even_when_told_to_replace() -> None:
    there = ("database slurm_acct", "package mariadb-server 10.11 ii")
    assert list(objected(Takeover.REPLACE, a=there, b=there)) == ["a"]
    assert objected(a=(*there, "own made database")) == {}


@pytest.mark.parametrize(
    "name",
    [
        "mysql-server",
        "mysql-server-8.0",
        "mysql-community-server",
        "percona-server-server",
        "percona-xtradb-cluster-server",
    ],
)
def test_a_database_of_another_make_is_not_touched(name: str) -> None:
    lines = (f"package {name} 8.0 hi",)
    assert list(objected(Takeover.REPLACE, a=lines, b=lines)) == ["a"]
    assert f"has {name}, and accounting is set up with MariaDB" in objected(a=lines)["a"]


@pytest.mark.parametrize("name", ["percona-toolkit", "percona-release", "percona-xtrabackup-80"])
def test_a_tool_for_databases_is_no_database(name: str) -> None:
    assert objected(a=(f"package {name} 8.0 ii",)) == {}


@pytest.mark.parametrize("line", ["package mysql-server 8.0 ii", "database mysql"])
def test_where_shoal_has_made_the_accounting_what_came_later_is_no_objection(line: str) -> None:
    assert list(objected(a=(line,))) == ["a"]
    assert objected(a=(line, "own cluster lab", "own made database")) == {}


@pytest.mark.parametrize(
    ("more", "may"),
    [
        ("package mariadb-server un", False),
        ("package mariadb-server 10.11 hi", True),
        ("package mariadb-server 10.11 rc", True),
        ("own packages mariadb-server", True),
    ],
)
def test_data_of_a_database_that_nobody_knows_is_not_taken_over(more: str, *, may: bool) -> None:
    assert objected(a=("database lost+found", more)) == {}, "a disk that was just mounted there"
    told_ = objected(a=("database mysql", more))
    assert ("/var/lib/mysql" in told_.get("a", "")) is not may


def test_a_mariadb_on_hold_is_somebodys_and_keeps_its_settings() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts, {"a": ("package mariadb-server 10.11 hi",)})
    steps = plan(found(inventory, facts), facts, SECRETS, parts_of(inventory.hosts))
    titles = [step.title for step in steps if step.stage is Stage.DATABASE]
    assert "mariadb runs (it was here before Shoal)" in titles
    assert f"file {render.MARIADB_CNF}" not in titles


def test_clocks_that_are_too_far_apart_for_munge_are_told() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    for off_s, refused in ((MAX_SKEW_S, []), (-MAX_SKEW_S - 1, ["10.0.0.2"])):
        facts["10.0.0.1"] = replace(facts["10.0.0.1"], off_s=1000)  # all but ours may be right
        facts["10.0.0.2"] = replace(facts["10.0.0.2"], off_s=1000 + off_s)
        facts["10.0.0.3"] = replace(facts["10.0.0.3"], off_s=1000)
        assert list(objections(inventory, facts, Takeover.REFUSE)) == refused


def test_two_machines_of_one_name_are_refused() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    facts["10.0.0.3"] = facts_of([host("b", 3)])["10.0.0.3"]
    assert sorted(objections(inventory, facts, Takeover.REFUSE)) == ["10.0.0.2", "10.0.0.3"]


def test_a_machine_with_the_name_of_a_member_is_refused_and_the_member_is_not() -> None:
    inventory = found(three(), facts_of(three().hosts))
    wider = inventory.with_hosts([*inventory.hosts, Host(address="10.0.0.9")])
    facts = facts_of(inventory.hosts) | {"10.0.0.9": facts_of([host("b", 9)])["10.0.0.9"]}
    assert list(objections(wider, facts, Takeover.REFUSE)) == ["10.0.0.9"]
    del facts["10.0.0.2"]
    first = "`shoal cluster remove b --cluster lab`"
    assert objections(wider, facts, Takeover.REFUSE) == {
        "10.0.0.9": [f"is called `b`, as 10.0.0.2 is, which does not answer; {first} first"]
    }
    unclean = inventory.hosts[1].model_copy(update={"found": None, "is_unclean": True})
    left = wider.with_hosts([wider.hosts[0], unclean, *wider.hosts[2:]])
    (told_,) = objections(left, facts, Takeover.REFUSE)["10.0.0.9"]
    assert f"which left and was not cleaned; {first} first" in told_


def test_a_member_that_took_the_name_of_another_is_the_one_that_is_refused() -> None:
    inventory = found(three(), facts_of(three().hosts))
    facts = facts_of(inventory.hosts)
    facts["10.0.0.3"] = facts_of([host("b", 3)])["10.0.0.3"]
    assert list(objections(inventory, facts, Takeover.REFUSE)) == ["10.0.0.3"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gpu 3 Enabled NVIDIA H100", "has MIG switched on at GPU 3"),
        ("hostname localhost", "calls itself `localhost`"),
        ("hostname a", "is called `b`, and so is another"),
    ],
)
def test_a_machine_that_would_not_work_is_refused_with_what_to_do(line: str, words: str) -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    text = told("b", "10.0.0.2", line)
    if line.startswith("hostname"):
        text = told(line.split()[1], "10.0.0.2")
    facts["10.0.0.2"] = read_facts(text, inventory.hosts[1])
    assert words in "; ".join(objections(inventory, facts, Takeover.REFUSE)["10.0.0.2"])


def misfit(**lines: tuple[str, ...]) -> dict[str, str]:
    inventory = three()
    facts = facts_of(inventory.hosts, dict(lines))
    return {a: "; ".join(words) for a, words in misfits(inventory, facts).items()}


@pytest.mark.parametrize(
    ("controller", "worker", "words"),
    [
        ("22.05.8-4", "22.05.8-4+deb12u3", ""),
        ("22.05.8-4", "24.11.5-1", "has Slurm 24.11 (debian 12), newer than the controller's 22.05"),
        ("24.11.5-1", "22.05.8-4", "too old for the controller's 24.11"),
        ("1:24.11.5-1", "1:23.11.4-1", ""),
        ("26.05.1-1", "22.05.8-4", ""),
    ],
)
def test_slurm_is_of_releases_that_understand_each_other(controller: str, worker: str, words: str) -> None:
    told_ = misfit(a=(f"package slurmctld {controller} ii",), b=(f"package slurmd {worker} ii",))
    assert words in told_.get("10.0.0.2", "")
    assert bool(told_) == bool(words)


def test_a_slurm_user_of_another_number_and_an_old_python_are_refused() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    facts["10.0.0.2"] = replace(facts["10.0.0.2"], slurm_uid=1001)
    facts["10.0.0.3"] = replace(facts["10.0.0.3"], python="3.9")
    words = misfits(inventory, facts)
    assert "`usermod -u 64030 slurm`" in words["10.0.0.2"][0]
    assert "has Python 3.9" in words["10.0.0.3"][0]


def test_a_login_that_is_somebody_else_elsewhere_is_told() -> None:
    inventory = three()
    facts = {a: replace(f, login=("ana", 1000)) for a, f in facts_of(inventory.hosts).items()}
    assert unlike_users(inventory, facts) == []
    facts["10.0.0.3"] = replace(facts["10.0.0.3"], login=("ana", 1001))
    (line,) = unlike_users(inventory, facts)
    assert line.startswith("c: logged in as `ana`, uid 1001; on the controller as `ana`, uid 1000")


def planned() -> tuple[Inventory, list[tuple[Stage, str, str]]]:
    inventory = three()
    facts = facts_of(inventory.hosts)
    inventory = found(inventory, facts)
    return inventory, [
        (s.stage, s.label, s.title) for s in plan(inventory, facts, SECRETS, parts_of(inventory.hosts))
    ]


def test_stages_come_in_order_and_daemons_after_their_files() -> None:
    _, steps = planned()
    assert [stage for stage, _, _ in steps] == sorted(stage for stage, _, _ in steps)
    order = [title for _, label, title in steps if label == "a"]
    for first, then in (
        ("packages", "file /etc/munge/munge.key"),
        ("file /etc/munge/munge.key", "munged"),
        ("munged", "slurmdbd"),
        ("file /etc/slurm/slurm.conf", "slurmctld"),
        ("slurmdbd", "cluster lab in accounting"),
        ("cluster lab in accounting", "slurmctld"),
        ("slurmctld", "slurmd runs"),
    ):
        where = [next(i for i, title in enumerate(order) if title.startswith(word)) for word in (first, then)]
        assert where[0] < where[1], (first, then)


def test_a_machine_that_is_away_stays_declared_and_gets_no_step() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    inventory = found(inventory, facts)
    away = facts.pop("10.0.0.2")
    assert away is not None
    steps = plan(inventory, facts, SECRETS, parts_of(inventory.hosts))
    assert {step.label for step in steps} == {"a", "c"}
    assert b"NodeName=b " in render.slurm_conf(inventory, facts).content


def test_a_machine_that_never_joined_is_not_declared() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    inventory = inventory.with_found({a: f.found for a, f in facts.items() if a != "10.0.0.2"})
    assert b"NodeName=b " not in render.slurm_conf(inventory, facts).content
    steps = [step for step in plan(inventory, facts, SECRETS, parts_of(inventory.hosts)) if step.label == "b"]
    assert {step.stage for step in steps} == {Stage.PREPARE}


def test_without_cgroups_somewhere_slurm_is_not_told_to_use_them_anywhere() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    whole = found(inventory, facts)
    assert b"ProctrackType=proctrack/cgroup" in render.slurm_conf(whole, facts).content
    from_text = told("b", "10.0.0.2", without="cgroup")
    facts["10.0.0.2"] = read_facts(from_text, host("b", 2))
    without = found(inventory, facts)
    assert b"ProctrackType=proctrack/linuxproc" in render.slurm_conf(without, facts).content
    assert b"Constrain" not in render.cgroup_conf(facts["10.0.0.2"]).content


def tracked(away: str, *, is_taken_up: bool = True) -> str:
    """How jobs are tracked while c is away, which told this of itself when it was there."""
    inventory = three()
    facts = facts_of(inventory.hosts, {"a": ("contained",) if is_taken_up else ()})
    facts["10.0.0.3"] = read_facts(away, inventory.hosts[2])
    inventory = found(inventory, facts)
    del facts["10.0.0.3"]
    text = render.slurm_conf(inventory, facts).content.decode()
    return next(line for line in text.splitlines() if line.startswith("ProctrackType="))


def test_a_machine_without_cgroups_is_remembered_while_it_is_away() -> None:
    assert tracked(told("c", "10.0.0.3", without="cgroup")) == "ProctrackType=proctrack/linuxproc"
    assert tracked(told("c", "10.0.0.3")) == CONTAINED


def test_cgroups_are_not_taken_up_while_somebody_is_away() -> None:
    """It would come back with the slurm.conf of before."""
    assert tracked(told("c", "10.0.0.3"), is_taken_up=False) == "ProctrackType=proctrack/linuxproc"


def test_of_an_inventory_that_knows_nothing_of_cgroups_only_who_answers_has_them() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts, {"a": ("contained",)})
    hosts = found(inventory, facts).model_dump()["hosts"]
    for item in hosts:
        del item["found"]["cgroup"]
    old = make({"cluster": "lab", "hosts": hosts}, "lab.yaml")
    assert render.is_contained(found(old, facts), facts)
    del facts["10.0.0.3"]
    assert not render.is_contained(found(old, facts), facts)


def test_settings_of_the_inventory_are_put_over_ours() -> None:
    inventory = three(slurm={"SlurmdTimeout": 7})
    facts = facts_of(inventory.hosts)
    text = render.slurm_conf(found(inventory, facts), facts).content.decode()
    assert text.count("SlurmdTimeout=") == 1
    assert "SlurmdTimeout=7\n" in text


def test_slurm_ends_nothing_on_a_node_that_is_back_before_a_fence_is_over() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts)
    text = render.slurm_conf(found(inventory, facts), facts).content.decode()
    [timeout] = re.findall(r"^SlurmdTimeout=([0-9]+)$", text, flags=re.MULTILINE)
    assert int(timeout) >= JobSpec.model_fields["fence"].default


@pytest.mark.parametrize(
    ("files", "range_"),
    [
        (("/dev/nvidia0",), "/dev/nvidia0"),
        (("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"), "/dev/nvidia[0-2]"),
        (("/dev/nvidia0", "/dev/nvidia2"), "/dev/nvidia[0,2]"),
        (("/dev/nvidia0", "/dev/other1"), "/dev/nvidia0,/dev/other1"),
    ],
)
def test_device_files_are_written_short(files: tuple[str, ...], range_: str) -> None:
    assert render.file_range(files) == range_


def test_a_password_that_could_end_its_quotes_is_never_sent() -> None:
    with pytest.raises(ValueError, match="letters and digits"):
        render.database_sql(render.Secrets(b"k", "x'; drop database slurm_acct; --"))


def leaving_titles(*more: str) -> list[str]:
    machine = host("b", 2)
    fact = facts_of([machine], {"b": more})[machine.address]
    return [step.title for step in leave(machine, fact, has_packages_removed=True)]


def test_a_machine_shoal_recorded_nothing_on_loses_nothing() -> None:
    assert leaving_titles(KEY, "package munge 1 ii", "file /etc/slurm/slurm.conf 22") == []


def test_only_what_shoal_wrote_leaves() -> None:
    titles = leaving_titles("own cluster lab", KEY, OWN_KEY, "file /etc/slurm/slurm.conf 22")
    assert "no /etc/munge/munge.key of Shoal's" in titles
    assert not [title for title in titles if "slurm.conf" in title]
    edited = ("own cluster lab", "file /etc/slurm/slurm.conf 23", "own files 22 /etc/slurm/slurm.conf")
    assert not [title for title in leaving_titles(*edited) if "slurm.conf" in title]
    machine = host("b", 2)
    fact = facts_of([machine], {"b": edited})[machine.address]
    assert left_behind(fact, has_packages_removed=True) == [
        "/etc/slurm/slurm.conf stays: it was changed since Shoal wrote it"
    ]


def test_a_munged_with_its_own_key_and_a_mariadb_that_was_there_run_on() -> None:
    own = ("own cluster lab", "own started munge", "own started mariadb")
    assert [title for title in leaving_titles(*own, KEY) if "does not run" in title] == []
    ours = leaving_titles(*own, KEY, OWN_KEY, "own packages mariadb-server")
    assert [title for title in ours if "does not run" in title] == [
        "mariadbd does not run",
        "munged does not run",
    ]


def test_a_firewall_is_advised_about_on_machines_that_run_one() -> None:
    inventory = three()
    facts = facts_of(
        inventory.hosts, {"b": ("firewall ufw",), "c": ("firewall nftables", "firewall firewalld")}
    )
    told_ = firewall(found(inventory, facts), facts)
    assert "on b: ufw allow proto tcp from 10.0.0.1 to any port 60001:63000,6818" in told_
    assert [line.split()[1] for line in told_[2:]] == ["b:"] * 2 + ["c:"] * 4


def test_firewalld_opens_the_ports_to_each_peer_alone_and_takes_them_up_at_once() -> None:
    inventory = three()
    facts = facts_of(inventory.hosts, {"c": ("firewall firewalld",)})
    told_ = firewall(found(inventory, facts), facts)[2:]
    rule = 'rule family="ipv4" source address="10.0.0.1" port port="6818" protocol="tcp" accept'
    assert f"--add-rich-rule='{rule}'" in told_[0]
    assert "60001-63000" in told_[0]
    assert "trusted" not in " ".join(told_)
    assert told_[2:] == ["on c: firewall-cmd --reload"]
