"""`shoal cluster` over machines on paper: what is printed, kept and refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.cli.cluster_connect import connect_shoal
from shoal.cli.cluster_inventory import alone
from shoal.client.connection import Connection
from shoal.clock import SystemClock
from shoal.cluster import ssh
from shoal.cluster.inventory import Host, load, save
from shoal.cluster.run import Crew
from shoal.engines.desk import Desk
from shoal.engines.slurm.config import SlurmConfig, load_config
from shoal.errors import EngineUnreachable, StateError
from tests.support.bare_machines import PART, PaperMachine, told
from tests.support.cli import Shell
from tests.unit.cluster.test_cli_cluster_connect import made
from tests.unit.engines.test_desk_terms import ORDER

CREATE = (
    "cluster",
    "create",
    "--hosts",
    "10.0.0.1,10.0.0.2",
    "--name",
    "lab",
    "--user",
    "root",
    "--no-connect",
)
NODE_PART = ("--python", "/usr/bin/python3", "--python-path", "/usr/local/lib/shoal-node")


@pytest.fixture
def drawer(monkeypatch: pytest.MonkeyPatch) -> dict[str, PaperMachine]:
    """Machines by address; every connection leads here. A third one is there and belongs to nobody."""
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    names = {"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.3": "c"}
    found = {address: PaperMachine(told(name, address)) for address, name in names.items()}

    async def connect(_: object, host: Host) -> PaperMachine:
        if host.address not in found:
            raise EngineUnreachable(f"{host.address} cannot be reached: no route", hint="ssh")
        return found[host.address]

    monkeypatch.setattr(ssh.Ssh, "connect", connect)
    monkeypatch.setattr(Crew, "pack", staticmethod(lambda _, __: PART))
    return found


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_cluster_is_made_kept_and_shown(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    assert "no cluster yet" in shell("cluster").out
    made = shell(*CREATE)
    assert (made.code, made.err) == (0, "-- cluster lab: 2 machines\n")
    assert made.out.startswith("firewall: between the machines, open tcp 6817 to a (slurmctld)")
    assert "\ncluster lab: nothing to change; " in made.out
    assert "firewall" not in shell(*CREATE).out
    assert " things looked at on 2 machines in " in made.out
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [host.label for host in kept.hosts] == ["a", "b"]
    assert shell("cluster").out.splitlines()[1].split() == ["lab", "a", "2"]
    rows = shell("cluster", "show").out.splitlines()
    assert rows[2].split() == ["b", "10.0.0.2", "joined", "8", "63552", "MiB", "-", "worker"]
    assert shell("cluster", "show", "--json").json()["hosts"][1]["found"]["cores"] == 2


def test_progress_tells_what_changed_and_who_failed(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    drawer["10.0.0.2"].judge = lambda script: int("slurmd.pid" in script or "slurmd\n" in script)
    drawer["10.0.0.1"].judge = lambda script: int("[ " in script and "/etc/slurm/gres.conf" in script)
    drawer["10.0.0.1"].facts = told("a", "10.0.0.1", "gpu 0 Disabled NVIDIA H200")
    made = shell(*CREATE)
    assert made.code == 5
    assert "a: FAILED: file /etc/slurm/gres.conf: it broke" in made.out.splitlines()
    assert made.out.splitlines()[-1] == "cluster lab: stopped; nothing was changed"
    assert (
        "`create` has not ended well yet: `shoal cluster create --name lab` goes on"
        in shell("cluster", "show").err
    )
    assert "error: the controller, a, failed at `file /etc/slurm/gres.conf`: it broke" in made.err


def test_a_worker_that_fails_is_told_and_the_rest_works(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    del drawer["10.0.0.2"]
    made = shell(*CREATE)
    assert made.code == 5
    assert "10.0.0.2: REFUSED: 10.0.0.2 cannot be reached: no route" in made.out
    assert made.out.splitlines()[-3:] == [
        "cluster lab: 1 of 2 machines failed, the other 1 did well",
        "next  mend it, then the same command again",
        "next  or leave it out: `shoal cluster remove 10.0.0.2 --cluster lab`",
    ]
    assert [host.label for host in load(shell.home / "clusters" / "lab.yaml").hosts] == ["a", "10.0.0.2"]


def test_a_machine_that_was_mistyped_is_left_out_as_it_is_said(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    del drawer["10.0.0.2"]
    assert shell(*CREATE).code == 5
    assert shell("cluster", "add", "10.0.0.3").out.splitlines()[-1].endswith("remove 10.0.0.2 --cluster lab`")
    assert shell("cluster", "remove", "10.0.0.2").code == 0
    assert shell("cluster", "create", "--no-connect").code == 0


def test_a_shared_directory_that_was_mistyped_is_not_kept(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    assert shell(*CREATE, "--shared", "/srv/shared").code == 0
    drawer["10.0.0.1"].judge = lambda script: int("/srv/sharde" in script)
    refused = shell(*CREATE, "--shared", "/srv/sharde")
    assert (refused.code, refused.out.splitlines()[-1]) == (5, "cluster lab: stopped; nothing was changed")
    assert "there is no directory /srv/sharde on a" in " ".join(refused.err.split())
    assert load(shell.home / "clusters" / "lab.yaml").shared == "/srv/shared"


def test_a_machine_that_is_named_twice_is_called_so(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    for words in (("--hosts", "10.0.0.1,10.0.0.1"), ("--hosts", "10.0.0.1,10.0.0.2,10.0.0.2")):
        twice = shell("cluster", "create", *words, "--no-connect")
        assert (twice.code, f"names {words[1][-8:]} twice" in twice.err) == (2, True)


def test_a_dry_run_prints_commands_and_files_but_no_secret(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    for machine in drawer.values():
        machine.judge = lambda _: 1
    dry = shell(*CREATE, "--dry-run")
    assert dry.code == 0
    assert "    | ClusterName=lab" in dry.out
    assert "    | (1024 secret bytes)" in dry.out
    assert "StoragePass" not in dry.out
    last = dry.out.splitlines()[-2]
    assert re.fullmatch(r"cluster lab: at most \d+ things would be changed on 2 machines", last)
    assert not (shell.home / "clusters").exists()
    steps = shell(*CREATE, "--dry-run", "--json").json()["steps"]
    secret = [step["file"] for step in steps if step.get("file", {}).get("path") == "/etc/munge/munge.key"]
    assert [file["content"] for file in secret] == [None, None]
    assert all(step["command"] for step in steps)


def claims(drawer: dict[str, PaperMachine]) -> set[str]:
    """What the machines were told of whose they are, since this was asked last."""
    scripts = [script for machine in drawer.values() for script, _ in machine.seen]
    for machine in drawer.values():
        machine.seen.clear()
    return {found for script in scripts for found in re.findall(r"shoal-cluster/cluster.*= '(.*)' ]", script)}


def test_a_cluster_has_one_id_from_the_first_run_on(
    shell: Shell, drawer: dict[str, PaperMachine], tmp_path: Path
) -> None:
    path = shell.home / "clusters" / "lab.yaml"
    drawer["10.0.0.1"].judge = lambda _: 1
    assert shell(*CREATE).code == 5  # it never ended well
    first = load(path).id
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert claims(drawer) == {f"lab {first}"}
    drawer["10.0.0.1"].judge = lambda _: 0
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nhosts:\n- {address: 10.0.0.1, roles: [controller, database, worker]}\n"
        "- {address: 10.0.0.2}\n"
    )
    for words in (CREATE, CREATE, ("cluster", "create", "--file", str(file), "--no-connect")):
        assert shell(*words).code == 0
        assert claims(drawer) == {f"lab {first}"}
    assert load(path).id == first


@pytest.mark.parametrize("words", [CREATE, ("cluster", "add", "10.0.0.3")])
def test_a_cluster_of_an_older_shoal_gets_an_id_that_is_kept_before_machines_hear_of_it(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    assert shell(*CREATE).code == 0
    path = shell.home / "clusters" / "lab.yaml"
    save(load(path).model_copy(update={"id": ""}), path)
    claims(drawer)
    assert shell("cluster", "upgrade").code == 0
    assert claims(drawer) == {"lab"}

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as off:
        off.setattr("anyio.run", cut)
        assert shell(*words).code == 130
    assert load(path).id
    save(load(path).model_copy(update={"id": ""}), path)
    drawer["10.0.0.1"].judge = lambda script: int("/srv/none" in script)
    assert shell("cluster", "create", "--shared", "/srv/none", "--no-connect").code == 5
    assert load(path).id


def test_the_same_name_from_another_home_takes_no_machine(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    theirs = "6b" * 16
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        drawer[address].facts = told(name, address, f"own cluster lab {theirs}")
    refused = shell(*CREATE)
    assert refused.code == 5
    assert f"put `id: {theirs}` into clusters/lab.yaml of this home" in " ".join(refused.err.split())
    assert all(machine.seen == [] for machine in drawer.values())
    path = shell.home / "clusters" / "lab.yaml"
    save(load(path).model_copy(update={"id": theirs}), path)
    assert shell(*CREATE).code == 0
    assert claims(drawer) == {f"lab {theirs}"}


def test_other_machines_under_the_same_name_are_refused(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    assert shell(*CREATE).code == 0
    more = shell("cluster", "create", "--hosts", "10.0.0.1,10.0.0.2,10.0.0.3", "--name", "lab")
    assert (more.code, more.err.splitlines()[-1]) == (3, "hint: `shoal cluster add 10.0.0.3 --cluster lab`")
    fewer = shell("cluster", "create", "--hosts", "10.0.0.1", "--name", "lab")
    assert (fewer.code, fewer.err.splitlines()[-1]) == (
        3,
        "hint: `shoal cluster remove 10.0.0.2 --cluster lab`",
    )
    assert shell("cluster", "create", "--hosts", "a", "--file", "x.yaml").code == 2


def test_the_order_in_which_machines_are_typed_again_moves_nothing(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    """The first one typed becomes the controller only when the cluster is made: a queue does not move."""
    assert shell(*CREATE).code == 0
    assert shell("cluster", "add", "10.0.0.3", "--switch", "rack2").code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    again = ("cluster", "create", "--name", "lab", "--no-connect", "--hosts")
    assert shell(*again, "10.0.0.3,ana@10.0.0.2:2222,10.0.0.1").code == 0
    other = load(shell.home / "clusters" / "lab.yaml")
    assert [(host.address, host.roles, host.switch) for host in other.hosts] == [
        (host.address, host.roles, host.switch) for host in kept.hosts
    ]
    assert [(host.user, host.port) for host in other.hosts] == [("root", None), ("ana", 2222), ("root", None)]
    for words in (("--controller", "10.0.0.2"), ("--no-controller-works",)):
        moved = shell(*again, "10.0.0.1,10.0.0.2,10.0.0.3", *words)
        assert (moved.code, moved.err.splitlines()[-1].split(":")[0]) == (3, "hint")


def test_an_inventory_of_ones_own_cannot_move_the_controller(
    shell: Shell, drawer: dict[str, PaperMachine], tmp_path: Path
) -> None:
    assert shell(*CREATE).code == 0
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nhosts:\n- {address: 10.0.0.1}\n- {address: 10.0.0.2, roles: [controller, database]}\n"
    )
    moved = shell("cluster", "create", "--file", str(file), "--no-connect")
    assert moved.code == 3
    assert "is 10.0.0.1, and cannot move to 10.0.0.2" in moved.err


def test_machines_come_and_go(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    assert shell(*CREATE).code == 0
    assert shell("cluster", "add", "10.0.0.3", "--switch", "rack2").code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [(host.label, host.user, host.switch) for host in kept.hosts][-1] == ("c", "root", "rack2")
    removed = shell("cluster", "remove", "c")
    assert (removed.code, "as soon as it is silent: `shoal nodes remove c`" in removed.err) == (0, True)
    assert len(load(shell.home / "clusters" / "lab.yaml").hosts) == 2
    assert shell("cluster", "upgrade").code == 0


def test_a_member_that_has_less_is_told_every_time_until_it_is_taken_as_found(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    drawer["10.0.0.2"].facts = told("b", "10.0.0.2", "gpu 0 Disabled NVIDIA H200")
    assert shell(*CREATE).code == 0
    drawer["10.0.0.2"].facts = told("b", "10.0.0.2")
    for _ in range(2):
        assert "note: b shows no GPU and stays declared with GPUs: 1 h200" in shell(*CREATE).out
    path = shell.home / "clusters" / "lab.yaml"
    kept = load(path)
    assert shell(*CREATE, "--as-found", "d").code == 4
    assert load(path) == kept
    assert "note: b" not in shell(*CREATE, "--as-found", "b").out
    assert "1 h200" not in shell("cluster", "show").out


def lost(_: str) -> int:
    raise EngineUnreachable("the connection was lost", hint="ssh")


@pytest.mark.parametrize(
    ("judge", "code"),
    [(lambda script: len(re.findall(r"is-active --quiet slurmd\b", script)), 5), (lost, 6)],
    ids=["its slurmd dies for it", "the connection is lost"],
)
def test_a_controller_that_has_less_is_told_also_where_the_command_is_refused(
    shell: Shell, drawer: dict[str, PaperMachine], judge: Callable[[str], int], code: int
) -> None:
    machine = drawer["10.0.0.1"]
    machine.facts = told("a", "10.0.0.1", "gpu 0 Disabled NVIDIA H200")
    assert shell(*CREATE).code == 0
    key = ("file /etc/munge/munge.key 11", "own files 11 /etc/munge/munge.key", "own cluster lab")
    machine.facts = told("a", "10.0.0.1", *(key if code == 6 else ()))
    machine.judge = judge
    refused = shell(*CREATE)
    assert refused.code == code
    note, last = refused.out.splitlines()[-2:]
    assert note.startswith("note: a shows no GPU and stays declared with GPUs: 1 h200, as it joined")
    assert note.endswith("`shoal cluster create --name lab --as-found a`")
    assert last == "cluster lab: stopped; nothing was changed"
    (remark,) = shell(*CREATE, "--json").json()["remarks"]
    assert note == f"note: {remark}"


def test_an_add_that_was_cut_off_is_known_and_goes_on(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as off:
        off.setattr("anyio.run", cut)
        told = shell("cluster", "add", "10.0.0.3")
        assert told.code == 130
        assert "the same command goes on where this one was" in told.err
    states = [row.split()[2:4] for row in shell("cluster", "show").out.splitlines()[1:]]
    assert states[-1] == ["not", "joined"]
    drawer["10.0.0.3"].judge = lambda _: 1
    assert shell("cluster", "add", "10.0.0.3").code == 5
    assert len(load(shell.home / "clusters" / "lab.yaml").hosts) == 2
    drawer["10.0.0.3"].judge = lambda _: 0
    assert shell("cluster", "add", "10.0.0.3").code == 0
    assert [host.label for host in load(shell.home / "clusters" / "lab.yaml").hosts] == ["a", "b", "c"]


def test_a_cluster_is_taken_down_only_by_who_says_yes(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    assert shell(*CREATE).code == 0
    asked = shell("cluster", "destroy")
    assert (asked.code, asked.err.splitlines()[-1]) == (3, "hint: shoal cluster destroy --cluster lab --yes")
    assert shell("cluster", "destroy", "--yes").code == 0
    assert "no cluster yet" in shell("cluster").out


def test_a_destroy_that_did_not_finish_is_shown(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    assert "did not finish" not in shell("cluster", "show").out

    async def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as off:
        off.setattr("shoal.cluster.operate.destroy", cut)
        assert shell("cluster", "destroy", "--yes").code == 130
    rows = shell("cluster", "show").out.splitlines()[1:]
    assert all("  destroy did not finish  " in row and "joined" not in row for row in rows)
    for words in (("cluster",), ("cluster", "show")):
        said = shell(*words).err
        assert re.findall(r"`(shoal [^`]*)`", said) == [
            "shoal cluster destroy --cluster lab --yes",
            "shoal cluster create --name lab",
        ]
    assert shell("cluster", "create", "--no-connect").code == 0
    assert "did not finish" not in shell("cluster", "show").out


def test_a_destroy_that_is_refused_has_not_begun(shell: Shell, drawer: dict[str, PaperMachine]) -> None:
    assert shell(*CREATE).code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    drawer["10.0.0.1"].facts = told("a", "10.0.0.1", f"own cluster lab {kept.id}")
    drawer["10.0.0.1"].judge = lambda script: int("squeue" in script)
    assert shell("cluster", "destroy", "--yes").code == 5
    assert load(shell.home / "clusters" / "lab.yaml") == kept


def test_who_has_several_clusters_may_type_what_is_printed(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    assert shell(*CREATE).code == 0
    (shell.home / "clusters" / "other.yaml").write_text(
        (shell.home / "clusters" / "lab.yaml").read_text().replace("cluster: lab", "cluster: other")
    )
    assert shell("cluster", "show").err.endswith("hint: add `--cluster lab`, say\n")
    assert shell("cluster", "create").err.endswith("hint: add `--name lab`, say\n")
    wrong = shell("cluster", "remove", "d", "--cluster", "lab")
    assert wrong.err.endswith("hint: shoal cluster show --cluster lab\n")
    drawer["10.0.0.1"].judge = lambda script: int("/srv/none" in script)
    refused = shell("cluster", "create", "--name", "lab", "--shared", "/srv/none", "--no-connect")
    told = refused.out + refused.err + shell("cluster", "add", "10.0.0.9", "--cluster", "lab").out
    typed = re.findall(r"`(shoal cluster [^`]*)`", " ".join(told.split()))
    assert len(typed) == 2
    assert all("--name lab" in command or "--cluster lab" in command for command in typed), typed


def connected(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shoal of this home is up, and has the cluster for its work."""
    monkeypatch.setattr("shoal.cli.cluster_connect.holder", lambda _: 4711)
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@10.0.0.1", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))


@pytest.mark.parametrize("refusals", [0, 2, 99])
def test_a_shoal_that_is_up_forgets_a_node_that_has_left(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Once it has seen that Slurm lists it no more; else it is said what will be seen."""
    assert shell(*CREATE).code == 0
    connected(shell, monkeypatch)
    asked: list[str] = []
    now = [0.0]

    def remove_node(_: object, node: str) -> None:
        asked.append(node)
        if len(asked) <= refusals:
            raise StateError(f"node {node} answers; only one that is gone can be removed")

    monkeypatch.setattr(Connection, "remove_node", remove_node)
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    removed = shell("cluster", "remove", "b")
    assert removed.code == 0
    assert set(asked) == {"b"}
    assert len(asked) == (refusals + 1 if refusals < 99 else 32)
    assert ("`shoal nodes remove b`" in removed.err) is (refusals == 99)


@pytest.mark.parametrize("user", ["ana", "root"])
def test_a_shared_directory_is_told_to_a_shoal_that_is_up(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """Whoever made the cluster, and as whomever it was connected: one command is enough."""
    connected(shell, monkeypatch)
    assert "/srv" not in connect_shoal(made(user), {})
    first, second = (made(user).model_copy(update={"shared": shared}) for shared in ("/srv/one", "/srv/two"))
    assert connect_shoal(first, {}).startswith("-- Shoal here takes /srv/one up within half a minute")
    assert load_config(shell.home).shared == "/srv/one"
    assert load_config(shell.home).heads == ("a",)
    assert connect_shoal(second, {}).endswith("from its next start on: `shoal down`, then `shoal up`")
    assert load_config(shell.home).shared == "/srv/two"
    (shell.home / "options.json").write_text('{"engine": "local"}')
    assert "/srv/two up" not in connect_shoal(first, {}), "it works elsewhere"
    assert load_config(shell.home).shared == "/srv/two"


def test_a_shoal_that_would_start_jobs_again_is_not_fought(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.setattr("shoal.cli.cluster_connect.holder", lambda _: 4711)
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@login", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))
    refused = shell("cluster", "destroy", "--yes", "--force")
    assert (refused.code, refused.err.splitlines()[-1]) == (3, "hint: `shoal down --jobs` first")
    assert "Shoal here is up (process 4711) and would start them again" in " ".join(refused.err.split())
    gone = shell("cluster", "destroy", "--yes")
    assert gone.code == 0
    assert "back to this machine: `shoal down`, then `shoal connect local`" in gone.err


def test_a_key_that_is_not_there_is_missed_here_and_no_machine_is_asked(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    done = shell(*CREATE, "--identity", "/no/key")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: there is no key /no/key here")
    assert not any(machine.seen for machine in drawer.values())


def test_what_may_run_for_all_shoal_knows_is_told_with_the_way_out(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    assert shell(*CREATE).code == 0
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@login", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))
    desk = Desk(shell.home, SystemClock())
    orders = [msgspec.structs.replace(ORDER, node=node, nodes=("b", "a")) for node in ("b", "a")]
    desk.add(tuple(orders), None)
    gone = shell("cluster", "destroy", "--yes", "--force")
    assert gone.code == 0
    typed = re.findall(r"`(shoal [^`]*)`", gone.err)
    assert typed == [
        "shoal up",
        "shoal nodes cordon a",
        "shoal nodes cordon b",
        "shoal nodes declare-dead a",
        "shoal nodes declare-dead b",
        "shoal down --jobs",
        "shoal down",
        "shoal connect local",
    ]


def test_a_shoal_that_works_elsewhere_hinders_nothing(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.setattr("shoal.cli.cluster_connect.holder", lambda _: 4711)
    gone = shell("cluster", "destroy", "--yes", "--force")
    assert (gone.code, "shoal connect local" in gone.err) == (0, False)


def test_an_inventory_of_ones_own_is_taken(
    shell: Shell, drawer: dict[str, PaperMachine], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nslurm: {KillWait: 5}\nhosts:\n"
        "- {address: 10.0.0.1, roles: [controller, database]}\n- {address: 10.0.0.2, name: gpu1}\n"
    )
    assert shell("cluster", "create", "--file", str(file), "--no-connect").code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [host.label for host in kept.hosts] == ["a", "gpu1"]
    assert dict(kept.slurm) == {"KillWait": 5}


@pytest.mark.parametrize("said", ["", ", is_unclean: true"])
def test_a_file_takes_back_no_mark_of_a_machine_that_was_not_cleaned_and_makes_none(
    shell: Shell, drawer: dict[str, PaperMachine], tmp_path: Path, said: str
) -> None:
    file = tmp_path / "cluster.yaml"
    head = "cluster: lab\nhosts:\n- {address: 10.0.0.1, roles: [controller, database]}\n"
    file.write_text(f"{head}- {{address: 10.0.0.2}}\n- {{address: 10.0.0.3}}\n")
    create = ("cluster", "create", "--file", str(file), "--no-connect")
    assert shell(*create).code == 0
    path = shell.home / "clusters" / "lab.yaml"
    kept = load(path)
    left = kept.hosts[2].model_copy(update={"name": "c", "found": None, "is_unclean": True})
    save(kept.with_hosts([*kept.hosts[:2], left]), path)
    file.write_text(f"{head}- {{address: 10.0.0.2{said}}}\n- {{address: 10.0.0.3}}\n")
    assert shell(*create).code == 0
    again = [(host.label, bool(host.found), host.is_unclean) for host in load(path).hosts]
    assert again == [("a", True, False), ("b", True, False), ("c", False, True)]


def test_without_asyncssh_it_is_said_what_to_install(
    shell: Shell, drawer: dict[str, PaperMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.delitem(sys.modules, "shoal.cluster.ssh")
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    for words in (CREATE, ("cluster", "destroy", "--yes")):
        asked = shell(*words)
        assert (asked.code, asked.err.splitlines()[-1]) == (3, "hint: pip install 'shoal[cluster]'")
    assert "did not finish" not in shell("cluster", "show").out


def test_a_second_command_is_refused_while_one_is_at_work(
    shell: Shell, drawer: dict[str, PaperMachine]
) -> None:
    with alone(is_dry=False):
        second = shell(*CREATE)
        assert (second.code, second.err.splitlines()[0].split(":")[0]) == (3, "error")
        assert "another `shoal cluster` is changing a cluster" in second.err
        assert shell(*CREATE, "--dry-run").code == 0
    assert shell(*CREATE).code == 0
