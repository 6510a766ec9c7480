"""What may be changed, which steps are planned in which order, and what is removed when a machine leaves."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shoal.cluster import render
from shoal.cluster.facts import CONTAINED, read_facts
from shoal.cluster.inventory import Inventory, InventoryHost, build_inventory
from shoal.cluster.preflight import (
    MAX_SKEW_S,
    Takeover,
    incompatibilities,
    mismatched_logins,
    preflight_problems,
)
from shoal.cluster.prerequisites import firewall_advice
from shoal.cluster.steps import StepStage, plan
from shoal.cluster.teardown import remaining_files_text, teardown_steps
from shoal.spec.job import JobSpec
from tests.support.fakes.machines import (
    CLUSTER_ID,
    SECRETS,
    archives_of,
    facts_of,
    facts_text,
    host,
    three_hosts,
    with_hardware,
)

KEY = "file /etc/munge/munge.key 11"
OWN_KEY = "own files 11 /etc/munge/munge.key"


def objected(takeover: Takeover = Takeover.REFUSE, **more: tuple[str, ...]) -> dict[str, str]:
    inventory = three_hosts()
    found_ = preflight_problems(inventory, facts_of(inventory.hosts, dict(more)), takeover)
    return {inventory.host(address).label: "; ".join(lines) for address, lines in found_.items()}


def test_bare_machines_pass_preflight() -> None:
    assert objected() == {}


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        (KEY, "munge.key that was there before Shoal"),
        ("file /etc/slurm/slurm.conf 22", "slurm.conf that was there before Shoal"),
        ("own cluster other", "belongs to cluster `other`"),
    ],
)
def test_existing_files_are_refused_without_existing_option(line: str, arguments: str) -> None:
    assert list(objected(b=(line,))) == ["b"]
    assert arguments in objected(b=(line,))["b"]


@pytest.mark.parametrize(
    ("claim", "is_refused"),
    [("lab", False), (f"lab {CLUSTER_ID}", False), (f"lab {'6b' * 16}", True), (f"other {CLUSTER_ID}", True)],
)
def test_a_machine_of_another_cluster_of_the_same_name_is_not_touched(
    claim: str, *, is_refused: bool
) -> None:
    inventory = three_hosts(id=CLUSTER_ID)
    facts = facts_of(inventory.hosts, {"b": (f"own cluster {claim}",)})
    told_ = preflight_problems(inventory, facts, Takeover.REPLACE)
    assert list(told_) == (["10.0.0.2"] if is_refused else [])
    if claim.startswith("lab") and is_refused:
        assert f"put `id: {'6b' * 16}` into clusters/lab.yaml of this home" in told_["10.0.0.2"][0]
        assert list(preflight_problems(three_hosts(), facts, Takeover.REPLACE)) == ["10.0.0.2"], (
            "an inventory without id"
        )


def test_a_machine_of_a_cluster_that_is_gone_can_be_freed_by_hand() -> None:
    """The machine was off while its cluster was destroyed by force, so no inventory has its id any more."""
    inventory = three_hosts(id=CLUSTER_ID)
    left = ("own made names", KEY, OWN_KEY)
    facts = facts_of(inventory.hosts, {"b": (f"own cluster lab {'6b' * 16}", *left)})
    (told_,) = preflight_problems(inventory, facts, Takeover.REFUSE)["10.0.0.2"]
    assert "was made by another inventory" in told_
    assert "if that cluster is gone, `rm /var/lib/shoal-cluster/cluster` on it" in told_
    assert preflight_problems(inventory, facts_of(inventory.hosts, {"b": left}), Takeover.REFUSE) == {}


def test_files_of_shoal_are_rewritten_unless_changed() -> None:
    assert objected(b=(KEY, OWN_KEY)) == {}
    changed = objected(b=("file /etc/munge/munge.key 12", OWN_KEY))
    assert "was changed since Shoal wrote it" in changed["b"]


def test_munge_key_made_by_the_installed_package_is_not_foreign() -> None:
    """A first run was interrupted between the package and the key."""
    assert objected(b=(KEY, "own cluster lab", "own packages munge")) == {}
    changed = objected(b=("file /etc/munge/munge.key 12", OWN_KEY, "own packages munge"))
    assert "was changed since Shoal wrote it" in changed["b"]


def test_a_key_may_be_kept_if_no_machine_has_another() -> None:
    assert objected(Takeover.KEEP, a=(KEY,)) == {}
    assert objected(Takeover.KEEP, a=(KEY,), b=(KEY,)) == {}
    assert list(objected(Takeover.KEEP, a=(KEY,), b=("file /etc/munge/munge.key 12",))) == ["b"]
    assert list(objected(Takeover.KEEP, b=("file /etc/slurm/slurm.conf 22",))) == ["b"]
    assert objected(Takeover.REPLACE, a=(KEY,), b=("file /etc/munge/munge.key 12",)) == {}


def test_keep_does_not_replace_a_key_that_only_a_worker_has() -> None:
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
def test_database_client_package_is_not_a_database(name: str) -> None:
    assert objected(a=(f"package {name} 8.0 ii",)) == {}


@pytest.mark.parametrize("line", ["package mysql-server 8.0 ii", "database mysql"])
def test_databases_added_after_shoal_made_accounting_are_accepted(line: str) -> None:
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
def test_unknown_database_files_are_not_taken_over(more: str, *, may: bool) -> None:
    assert objected(a=("database lost+found", more)) == {}, "a disk that was just mounted there"
    told_ = objected(a=("database mysql", more))
    assert ("/var/lib/mysql" in told_.get("a", "")) is not may


def test_held_mariadb_keeps_its_settings() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts, {"a": ("package mariadb-server 10.11 hi",)})
    steps = plan(with_hardware(inventory, facts), facts, SECRETS, archives_of(inventory.hosts))
    titles = [step.title for step in steps if step.stage is StepStage.DATABASE]
    assert "mariadb runs (it was here before Shoal)" in titles
    assert f"file {render.MARIADB_CNF}" not in titles


def test_clock_skew_beyond_munge_is_reported() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    for off_s, refused in ((MAX_SKEW_S, []), (-MAX_SKEW_S - 1, ["10.0.0.2"])):
        facts["10.0.0.1"] = replace(facts["10.0.0.1"], clock_skew_s=1000)  # all but ours may be right
        facts["10.0.0.2"] = replace(facts["10.0.0.2"], clock_skew_s=1000 + off_s)
        facts["10.0.0.3"] = replace(facts["10.0.0.3"], clock_skew_s=1000)
        assert list(preflight_problems(inventory, facts, Takeover.REFUSE)) == refused


def test_two_machines_of_one_name_are_refused() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    facts["10.0.0.3"] = facts_of([host("b", 3)])["10.0.0.3"]
    assert sorted(preflight_problems(inventory, facts, Takeover.REFUSE)) == ["10.0.0.2", "10.0.0.3"]


def test_a_machine_with_the_name_of_a_member_is_refused_and_the_member_is_not() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    wider = inventory.with_hosts([*inventory.hosts, InventoryHost(address="10.0.0.9")])
    facts = facts_of(inventory.hosts) | {"10.0.0.9": facts_of([host("b", 9)])["10.0.0.9"]}
    assert list(preflight_problems(wider, facts, Takeover.REFUSE)) == ["10.0.0.9"]
    del facts["10.0.0.2"]
    first = "`shoal cluster remove b --cluster lab`"
    assert preflight_problems(wider, facts, Takeover.REFUSE) == {
        "10.0.0.9": [f"is called `b`, as 10.0.0.2 is, which does not answer; {first} first"]
    }
    unclean = inventory.hosts[1].model_copy(update={"hardware": None, "is_unclean": True})
    left = wider.with_hosts([wider.hosts[0], unclean, *wider.hosts[2:]])
    (told_,) = preflight_problems(left, facts, Takeover.REFUSE)["10.0.0.9"]
    assert f"which left and was not cleaned; {first} first" in told_


def test_a_member_that_took_the_name_of_another_is_the_one_that_is_refused() -> None:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    facts = facts_of(inventory.hosts)
    facts["10.0.0.3"] = facts_of([host("b", 3)])["10.0.0.3"]
    assert list(preflight_problems(inventory, facts, Takeover.REFUSE)) == ["10.0.0.3"]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("gpu 3 Enabled NVIDIA H100", "has MIG switched on at GPU 3"),
        ("hostname localhost", "calls itself `localhost`"),
        ("hostname a", "is called `b`, and so is another"),
    ],
)
def test_a_machine_that_would_not_work_is_refused_with_what_to_do(line: str, arguments: str) -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    text = facts_text("b", "10.0.0.2", line)
    if line.startswith("hostname"):
        text = facts_text(line.split()[1], "10.0.0.2")
    facts["10.0.0.2"] = read_facts(text, inventory.hosts[1])
    assert arguments in "; ".join(preflight_problems(inventory, facts, Takeover.REFUSE)["10.0.0.2"])


def misfit(**lines: tuple[str, ...]) -> dict[str, str]:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts, dict(lines))
    return {a: "; ".join(problems) for a, problems in incompatibilities(inventory, facts).items()}


@pytest.mark.parametrize(
    ("controller", "worker", "arguments"),
    [
        ("22.05.8-4", "22.05.8-4+deb12u3", ""),
        ("22.05.8-4", "24.11.5-1", "has Slurm 24.11 (debian 12), newer than the controller's 22.05"),
        ("24.11.5-1", "22.05.8-4", "too old for the controller's 24.11"),
        ("1:24.11.5-1", "1:23.11.4-1", ""),
        ("26.05.1-1", "22.05.8-4", ""),
    ],
)
def test_slurm_releases_must_be_compatible(controller: str, worker: str, arguments: str) -> None:
    told_ = misfit(a=(f"package slurmctld {controller} ii",), b=(f"package slurmd {worker} ii",))
    assert arguments in told_.get("10.0.0.2", "")
    assert bool(told_) == bool(arguments)


def test_a_slurm_user_of_another_number_and_an_old_python_are_refused() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    facts["10.0.0.2"] = replace(facts["10.0.0.2"], slurm_uid=1001)
    facts["10.0.0.3"] = replace(facts["10.0.0.3"], python="3.9")
    arguments = incompatibilities(inventory, facts)
    assert "`usermod -u 64030 slurm`" in arguments["10.0.0.2"][0]
    assert "has Python 3.9" in arguments["10.0.0.3"][0]


def test_login_with_another_uid_elsewhere_is_reported() -> None:
    inventory = three_hosts()
    facts = {a: replace(f, login=("ana", 1000)) for a, f in facts_of(inventory.hosts).items()}
    assert mismatched_logins(inventory, facts) == []
    facts["10.0.0.3"] = replace(facts["10.0.0.3"], login=("ana", 1001))
    (line,) = mismatched_logins(inventory, facts)
    assert line.startswith("c: logged in as `ana`, uid 1001; on the controller as `ana`, uid 1000")


def planned() -> tuple[Inventory, list[tuple[StepStage, str, str]]]:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    inventory = with_hardware(inventory, facts)
    return inventory, [
        (s.stage, s.label, s.title) for s in plan(inventory, facts, SECRETS, archives_of(inventory.hosts))
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
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    inventory = with_hardware(inventory, facts)
    away = facts.pop("10.0.0.2")
    assert away is not None
    steps = plan(inventory, facts, SECRETS, archives_of(inventory.hosts))
    assert {step.label for step in steps} == {"a", "c"}
    assert b"NodeName=b " in render.slurm_conf(inventory, facts).content


def test_a_machine_that_never_joined_is_not_declared() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    inventory = inventory.with_hardware({a: f.hardware for a, f in facts.items() if a != "10.0.0.2"})
    assert b"NodeName=b " not in render.slurm_conf(inventory, facts).content
    steps = [
        step for step in plan(inventory, facts, SECRETS, archives_of(inventory.hosts)) if step.label == "b"
    ]
    assert {step.stage for step in steps} == {StepStage.PREPARE}


def test_machine_without_cgroups_switches_them_off_everywhere() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    whole = with_hardware(inventory, facts)
    assert b"ProctrackType=proctrack/cgroup" in render.slurm_conf(whole, facts).content
    from_text = facts_text("b", "10.0.0.2", without="cgroup")
    facts["10.0.0.2"] = read_facts(from_text, host("b", 2))
    without = with_hardware(inventory, facts)
    assert b"ProctrackType=proctrack/linuxproc" in render.slurm_conf(without, facts).content
    assert b"Constrain" not in render.cgroup_conf(facts["10.0.0.2"]).content


def tracked(away: str, *, is_taken_up: bool = True) -> str:
    """Return how jobs are tracked while c is away, which reported this of itself before."""
    inventory = three_hosts()
    facts = facts_of(inventory.hosts, {"a": ("contained",) if is_taken_up else ()})
    facts["10.0.0.3"] = read_facts(away, inventory.hosts[2])
    inventory = with_hardware(inventory, facts)
    del facts["10.0.0.3"]
    text = render.slurm_conf(inventory, facts).content.decode()
    return next(line for line in text.splitlines() if line.startswith("ProctrackType="))


def test_a_machine_without_cgroups_is_remembered_while_it_is_away() -> None:
    assert tracked(facts_text("c", "10.0.0.3", without="cgroup")) == "ProctrackType=proctrack/linuxproc"
    assert tracked(facts_text("c", "10.0.0.3")) == CONTAINED


def test_cgroups_are_not_switched_on_while_a_machine_is_away() -> None:
    """The machine would come back with its earlier slurm.conf."""
    assert tracked(facts_text("c", "10.0.0.3"), is_taken_up=False) == "ProctrackType=proctrack/linuxproc"


def test_inventory_without_cgroup_facts_counts_only_machines_that_answer() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts, {"a": ("contained",)})
    hosts = with_hardware(inventory, facts).model_dump()["hosts"]
    for item in hosts:
        del item["hardware"]["cgroup"]
    old = build_inventory({"cluster": "lab", "hosts": hosts}, "lab.yaml")
    assert render.is_contained(with_hardware(old, facts), facts)
    del facts["10.0.0.3"]
    assert not render.is_contained(with_hardware(old, facts), facts)


def test_settings_of_the_inventory_override_ours() -> None:
    inventory = three_hosts(slurm={"SlurmdTimeout": 7})
    facts = facts_of(inventory.hosts)
    text = render.slurm_conf(with_hardware(inventory, facts), facts).content.decode()
    assert text.count("SlurmdTimeout=") == 1
    assert "SlurmdTimeout=7\n" in text


def test_slurm_keeps_jobs_of_a_node_that_returns_within_a_fence() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts)
    text = render.slurm_conf(with_hardware(inventory, facts), facts).content.decode()
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
        render.database_sql(render.ClusterSecrets(b"k", "x'; drop database slurm_acct; --"))


def leaving_titles(*more: str) -> list[str]:
    machine = host("b", 2)
    fact = facts_of([machine], {"b": more})[machine.address]
    return [step.title for step in teardown_steps(machine, fact, has_packages_removed=True)]


def test_machine_without_records_loses_nothing() -> None:
    assert leaving_titles(KEY, "package munge 1 ii", "file /etc/slurm/slurm.conf 22") == []


def test_only_files_of_shoal_are_removed() -> None:
    titles = leaving_titles("own cluster lab", KEY, OWN_KEY, "file /etc/slurm/slurm.conf 22")
    assert "no /etc/munge/munge.key of Shoal's" in titles
    assert not [title for title in titles if "slurm.conf" in title]
    edited = ("own cluster lab", "file /etc/slurm/slurm.conf 23", "own files 22 /etc/slurm/slurm.conf")
    assert not [title for title in leaving_titles(*edited) if "slurm.conf" in title]
    machine = host("b", 2)
    fact = facts_of([machine], {"b": edited})[machine.address]
    assert remaining_files_text(fact, has_packages_removed=True) == [
        "/etc/slurm/slurm.conf stays: it was changed since Shoal wrote it"
    ]


def test_earlier_munged_and_mariadb_keep_running() -> None:
    records = ("own cluster lab", "own started munge", "own started mariadb")
    assert [title for title in leaving_titles(*records, KEY) if "does not run" in title] == []
    ours = leaving_titles(*records, KEY, OWN_KEY, "own packages mariadb-server")
    assert [title for title in ours if "does not run" in title] == [
        "mariadbd does not run",
        "munged does not run",
    ]


def test_a_firewall_is_advised_about_on_machines_that_run_one() -> None:
    inventory = three_hosts()
    facts = facts_of(
        inventory.hosts, {"b": ("firewall ufw",), "c": ("firewall nftables", "firewall firewalld")}
    )
    told_ = firewall_advice(with_hardware(inventory, facts), facts)
    assert "on b: ufw allow proto tcp from 10.0.0.1 to any port 60001:63000,6818" in told_
    assert [line.split()[1] for line in told_[2:]] == ["b:"] * 2 + ["c:"] * 4


def test_firewalld_rules_open_ports_per_peer_and_reload() -> None:
    inventory = three_hosts()
    facts = facts_of(inventory.hosts, {"c": ("firewall firewalld",)})
    told_ = firewall_advice(with_hardware(inventory, facts), facts)[2:]
    rule = 'rule family="ipv4" source address="10.0.0.1" port port="6818" protocol="tcp" accept'
    assert f"--add-rich-rule='{rule}'" in told_[0]
    assert "60001-63000" in told_[0]
    assert "trusted" not in " ".join(told_)
    assert told_[2:] == ["on c: firewall-cmd --reload"]
