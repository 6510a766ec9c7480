"""`shoal cluster` over fake machines: what it prints, saves and refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from shoal.cli.cluster.connection import connect_shoal
from shoal.cli.cluster.selection import exclusive_change
from shoal.client.connection import Connection
from shoal.clock import SystemClock
from shoal.cluster import ssh
from shoal.cluster.inventory import InventoryHost, load, save
from shoal.cluster.session import ClusterSession
from shoal.engines.remote.mailbox import Mailbox
from shoal.engines.slurm.config import SlurmConfig, load_config
from shoal.errors import EngineUnreachable, StateError
from tests.support.fakes.api_server import Shell
from tests.support.fakes.machines import ARCHIVE, FakeMachine, facts_text
from tests.support.runtime.task_specs import change_task_spec
from tests.unit.cluster.test_cli_cluster_connect import inventory_of
from tests.unit.engines.remote.test_mailbox_terms import ORDER

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
def drawer(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeMachine]:
    """Machines by address; every connection leads here. A third machine exists and belongs to no cluster."""
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    names = {"10.0.0.1": "a", "10.0.0.2": "b", "10.0.0.3": "c"}
    machines = {address: FakeMachine(facts_text(name, address)) for address, name in names.items()}

    async def connect(_: object, host: InventoryHost) -> FakeMachine:
        if host.address not in machines:
            raise EngineUnreachable(f"{host.address} cannot be reached: no route", hint="ssh")
        return machines[host.address]

    monkeypatch.setattr(ssh.Ssh, "connect", connect)
    monkeypatch.setattr(ClusterSession, "pack", staticmethod(lambda _, __: ARCHIVE))
    return machines


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_cluster_is_created_saved_and_shown(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert "no cluster yet" in shell("cluster").out
    result = shell(*CREATE)
    assert (result.code, result.err) == (0, "-- cluster lab: 2 machines\n")
    assert result.out.startswith("firewall: between the machines, open tcp 6817 to a (slurmctld)")
    assert "\ncluster lab: nothing to change; " in result.out
    assert "firewall" not in shell(*CREATE).out
    assert " things checked on 2 machines in " in result.out
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [host.label for host in kept.hosts] == ["a", "b"]
    assert shell("cluster").out.splitlines()[1].split() == ["lab", "a", "2"]
    rows = shell("cluster", "show").out.splitlines()
    assert rows[2].split() == ["b", "10.0.0.2", "joined", "8", "63552", "MiB", "-", "worker"]
    assert shell("cluster", "show", "--json").json()["hosts"][1]["hardware"]["cores"] == 2


def test_progress_shows_changes_and_failed_machines(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    drawer["10.0.0.2"].exit_code_of = lambda script: int("slurmd.pid" in script or "slurmd\n" in script)
    drawer["10.0.0.1"].exit_code_of = lambda script: int("[ " in script and "/etc/slurm/gres.conf" in script)
    drawer["10.0.0.1"].facts = facts_text("a", "10.0.0.1", "gpu 0 Disabled NVIDIA H200")
    result = shell(*CREATE)
    assert result.code == 5
    assert "a: FAILED: file /etc/slurm/gres.conf: it broke" in result.out.splitlines()
    assert result.out.splitlines()[-1] == "cluster lab: stopped; nothing was changed"
    assert (
        "`create` has not finished: `shoal cluster create --name lab` continues it"
        in shell("cluster", "show").err
    )
    assert "error: the controller, a, failed at `file /etc/slurm/gres.conf`: it broke" in result.err


def test_failed_worker_is_reported_and_the_rest_works(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    del drawer["10.0.0.2"]
    result = shell(*CREATE)
    assert result.code == 5
    assert "10.0.0.2: REFUSED: 10.0.0.2 cannot be reached: no route" in result.out
    assert result.out.splitlines()[-3:] == [
        "cluster lab: 1 of 2 machines failed, the other 1 succeeded",
        "next  fix it, then run the same command again",
        "next  or leave it out: `shoal cluster remove 10.0.0.2 --cluster lab`",
    ]
    assert [host.label for host in load(shell.home / "clusters" / "lab.yaml").hosts] == ["a", "10.0.0.2"]


def test_mistyped_machine_is_dropped_by_the_printed_command(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    del drawer["10.0.0.2"]
    assert shell(*CREATE).code == 5
    assert shell("cluster", "add", "10.0.0.3").out.splitlines()[-1].endswith("remove 10.0.0.2 --cluster lab`")
    assert shell("cluster", "remove", "10.0.0.2").code == 0
    assert shell("cluster", "create", "--no-connect").code == 0


def test_mistyped_shared_directory_is_not_saved(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert shell(*CREATE, "--shared", "/srv/shared").code == 0
    drawer["10.0.0.1"].exit_code_of = lambda script: int("/srv/sharde" in script)
    refused = shell(*CREATE, "--shared", "/srv/sharde")
    assert (refused.code, refused.out.splitlines()[-1]) == (5, "cluster lab: stopped; nothing was changed")
    assert "there is no directory /srv/sharde on a" in " ".join(refused.err.split())
    assert load(shell.home / "clusters" / "lab.yaml").shared == "/srv/shared"


def test_machine_named_twice_is_refused(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    for arguments in (("--hosts", "10.0.0.1,10.0.0.1"), ("--hosts", "10.0.0.1,10.0.0.2,10.0.0.2")):
        twice = shell("cluster", "create", *arguments, "--no-connect")
        assert (twice.code, f"names {arguments[1][-8:]} twice" in twice.err) == (2, True)


def test_a_dry_run_prints_commands_and_files_but_no_secret(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    for machine in drawer.values():
        machine.exit_code_of = lambda _: 1
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


def claims(drawer: dict[str, FakeMachine]) -> set[str]:
    """Return the claims written to machines since the last call."""
    scripts = [script for machine in drawer.values() for script, _ in machine.scripts]
    for machine in drawer.values():
        machine.scripts.clear()
    return {claim for script in scripts for claim in re.findall(r"shoal-cluster/cluster.*= '(.*)' ]", script)}


def test_a_cluster_has_one_id_from_the_first_run_on(
    shell: Shell, drawer: dict[str, FakeMachine], tmp_path: Path
) -> None:
    path = shell.home / "clusters" / "lab.yaml"
    drawer["10.0.0.1"].exit_code_of = lambda _: 1
    assert shell(*CREATE).code == 5  # it never ended well
    first = load(path).id
    assert re.fullmatch("[0-9a-f]{32}", first)
    assert claims(drawer) == {f"lab {first}"}
    drawer["10.0.0.1"].exit_code_of = lambda _: 0
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nhosts:\n- {address: 10.0.0.1, roles: [controller, database, worker]}\n"
        "- {address: 10.0.0.2}\n"
    )
    for arguments in (CREATE, CREATE, ("cluster", "create", "--file", str(file), "--no-connect")):
        assert shell(*arguments).code == 0
        assert claims(drawer) == {f"lab {first}"}
    assert load(path).id == first


@pytest.mark.parametrize("arguments", [CREATE, ("cluster", "add", "10.0.0.3")])
def test_cluster_of_an_older_shoal_gets_an_id_saved_before_machines_get_it(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
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
        assert shell(*arguments).code == 130
    assert load(path).id
    save(load(path).model_copy(update={"id": ""}), path)
    drawer["10.0.0.1"].exit_code_of = lambda script: int("/srv/none" in script)
    assert shell("cluster", "create", "--shared", "/srv/none", "--no-connect").code == 5
    assert load(path).id


def test_the_same_name_from_another_home_takes_no_machine(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    theirs = "6b" * 16
    for name, address in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        drawer[address].facts = facts_text(name, address, f"own cluster lab {theirs}")
    refused = shell(*CREATE)
    assert refused.code == 5
    assert f"put `id: {theirs}` into clusters/lab.yaml of this home" in " ".join(refused.err.split())
    assert all(machine.scripts == [] for machine in drawer.values())
    path = shell.home / "clusters" / "lab.yaml"
    save(load(path).model_copy(update={"id": theirs}), path)
    assert shell(*CREATE).code == 0
    assert claims(drawer) == {f"lab {theirs}"}


def test_other_machines_under_the_same_name_are_refused(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert shell(*CREATE).code == 0
    more = shell("cluster", "create", "--hosts", "10.0.0.1,10.0.0.2,10.0.0.3", "--name", "lab")
    assert (more.code, more.err.splitlines()[-1]) == (3, "hint: `shoal cluster add 10.0.0.3 --cluster lab`")
    fewer = shell("cluster", "create", "--hosts", "10.0.0.1", "--name", "lab")
    assert (fewer.code, fewer.err.splitlines()[-1]) == (
        3,
        "hint: `shoal cluster remove 10.0.0.2 --cluster lab`",
    )
    assert shell("cluster", "create", "--hosts", "a", "--file", "x.yaml").code == 2


def test_order_of_machines_typed_again_moves_nothing(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    """The first typed machine becomes the controller only at creation, because a queue does not move."""
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
    for arguments in (("--controller", "10.0.0.2"), ("--no-controller-works",)):
        moved = shell(*again, "10.0.0.1,10.0.0.2,10.0.0.3", *arguments)
        assert (moved.code, moved.err.splitlines()[-1].split(":")[0]) == (3, "hint")


def test_an_inventory_of_ones_own_cannot_move_the_controller(
    shell: Shell, drawer: dict[str, FakeMachine], tmp_path: Path
) -> None:
    assert shell(*CREATE).code == 0
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nhosts:\n- {address: 10.0.0.1}\n- {address: 10.0.0.2, roles: [controller, database]}\n"
    )
    moved = shell("cluster", "create", "--file", str(file), "--no-connect")
    assert moved.code == 3
    assert "is 10.0.0.1, and cannot move to 10.0.0.2" in moved.err


def test_machines_come_and_go(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert shell(*CREATE).code == 0
    assert shell("cluster", "add", "10.0.0.3", "--switch", "rack2").code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [(host.label, host.user, host.switch) for host in kept.hosts][-1] == ("c", "root", "rack2")
    removed = shell("cluster", "remove", "c")
    assert (removed.code, "as soon as they are silent: `shoal nodes remove c`" in removed.err) == (0, True)
    assert len(load(shell.home / "clusters" / "lab.yaml").hosts) == 2
    assert shell("cluster", "upgrade").code == 0


def test_member_with_less_is_reported_until_accepted_as_found(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    drawer["10.0.0.2"].facts = facts_text("b", "10.0.0.2", "gpu 0 Disabled NVIDIA H200")
    assert shell(*CREATE).code == 0
    drawer["10.0.0.2"].facts = facts_text("b", "10.0.0.2")
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
def test_controller_with_less_is_reported_also_when_refused(
    shell: Shell, drawer: dict[str, FakeMachine], judge: Callable[[str], int], code: int
) -> None:
    machine = drawer["10.0.0.1"]
    machine.facts = facts_text("a", "10.0.0.1", "gpu 0 Disabled NVIDIA H200")
    assert shell(*CREATE).code == 0
    key = ("file /etc/munge/munge.key 11", "own files 11 /etc/munge/munge.key", "own cluster lab")
    machine.facts = facts_text("a", "10.0.0.1", *(key if code == 6 else ()))
    machine.exit_code_of = judge
    refused = shell(*CREATE)
    assert refused.code == code
    note, last = refused.out.splitlines()[-2:]
    assert note.startswith("note: a shows no GPU and stays declared with GPUs: 1 h200, as it joined")
    assert note.endswith("`shoal cluster create --name lab --as-found a`")
    assert last == "cluster lab: stopped; nothing was changed"
    (remark,) = shell(*CREATE, "--json").json()["remarks"]
    assert note == f"note: {remark}"


def test_interrupted_add_is_saved_and_continues(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0

    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as off:
        off.setattr("anyio.run", cut)
        result = shell("cluster", "add", "10.0.0.3")
        assert result.code == 130
        assert "the same command continues from there" in result.err
    states = [row.split()[2:4] for row in shell("cluster", "show").out.splitlines()[1:]]
    assert states[-1] == ["not", "joined"]
    drawer["10.0.0.3"].exit_code_of = lambda _: 1
    assert shell("cluster", "add", "10.0.0.3").code == 5
    assert len(load(shell.home / "clusters" / "lab.yaml").hosts) == 2
    drawer["10.0.0.3"].exit_code_of = lambda _: 0
    assert shell("cluster", "add", "10.0.0.3").code == 0
    assert [host.label for host in load(shell.home / "clusters" / "lab.yaml").hosts] == ["a", "b", "c"]


def test_destroy_needs_yes(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert shell(*CREATE).code == 0
    result = shell("cluster", "destroy")
    assert (result.code, result.err.splitlines()[-1]) == (
        3,
        "hint: shoal cluster destroy --cluster lab --yes",
    )
    assert shell("cluster", "destroy", "--yes").code == 0
    assert "no cluster yet" in shell("cluster").out


def test_a_destroy_that_did_not_finish_is_shown(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    assert "did not finish" not in shell("cluster", "show").out

    async def cut(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as off:
        off.setattr("shoal.cluster.operations.destroy", cut)
        assert shell("cluster", "destroy", "--yes").code == 130
    rows = shell("cluster", "show").out.splitlines()[1:]
    assert all("  destroy did not finish  " in row and "joined" not in row for row in rows)
    for arguments in (("cluster",), ("cluster", "show")):
        errors = shell(*arguments).err
        assert re.findall(r"`(shoal [^`]*)`", errors) == [
            "shoal cluster destroy --cluster lab --yes",
            "shoal cluster create --name lab",
        ]
    assert shell("cluster", "create", "--no-connect").code == 0
    assert "did not finish" not in shell("cluster", "show").out


def test_a_destroy_that_is_refused_has_not_begun(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    assert shell(*CREATE).code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    drawer["10.0.0.1"].facts = facts_text("a", "10.0.0.1", f"own cluster lab {kept.id}")
    drawer["10.0.0.1"].exit_code_of = lambda script: int("squeue" in script)
    assert shell("cluster", "destroy", "--yes").code == 5
    assert load(shell.home / "clusters" / "lab.yaml") == kept


def test_printed_commands_name_the_cluster_if_there_are_several(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    assert shell(*CREATE).code == 0
    (shell.home / "clusters" / "other.yaml").write_text(
        (shell.home / "clusters" / "lab.yaml").read_text().replace("cluster: lab", "cluster: other")
    )
    assert shell("cluster", "show").err.endswith("hint: add `--cluster lab`, say\n")
    assert shell("cluster", "create").err.endswith("hint: add `--name lab`, say\n")
    wrong = shell("cluster", "remove", "d", "--cluster", "lab")
    assert wrong.err.endswith("hint: shoal cluster show --cluster lab\n")
    drawer["10.0.0.1"].exit_code_of = lambda script: int("/srv/none" in script)
    refused = shell("cluster", "create", "--name", "lab", "--shared", "/srv/none", "--no-connect")
    output = refused.out + refused.err + shell("cluster", "add", "10.0.0.9", "--cluster", "lab").out
    typed = re.findall(r"`(shoal cluster [^`]*)`", " ".join(output.split()))
    assert len(typed) == 2
    assert all("--name lab" in command or "--cluster lab" in command for command in typed), typed


def connected(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """This home's Shoal runs and uses the cluster."""
    monkeypatch.setattr("shoal.cli.cluster.connection.pid_holding", lambda _: 4711)
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@10.0.0.1", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))


@pytest.mark.parametrize("refusals", [0, 2, 99])
def test_running_shoal_forgets_a_removed_node(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """It forgets the node after Slurm no longer lists it; otherwise the command prints what to expect."""
    assert shell(*CREATE).code == 0
    connected(shell, monkeypatch)
    removed_nodes: list[str] = []
    now = [0.0]

    def remove_node(_: object, node: str) -> None:
        removed_nodes.append(node)
        if len(removed_nodes) <= refusals:
            raise StateError(f"node {node} answers; only one that is gone can be removed")

    monkeypatch.setattr(Connection, "remove_node", remove_node)
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    removed = shell("cluster", "remove", "b")
    assert removed.code == 0
    assert set(removed_nodes) == {"b"}
    assert len(removed_nodes) == (refusals + 1 if refusals < 99 else 32)
    assert ("`shoal nodes remove b`" in removed.err) is (refusals == 99)


@pytest.mark.parametrize("user", ["ana", "root"])
def test_running_shoal_gets_the_new_shared_directory(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """One command is enough, whichever user created the cluster and whichever user connected it."""
    connected(shell, monkeypatch)
    assert "/srv" not in connect_shoal(inventory_of(user), {})
    first, second = (
        inventory_of(user).model_copy(update={"shared": shared}) for shared in ("/srv/one", "/srv/two")
    )
    assert connect_shoal(first, {}).startswith("-- Shoal here uses /srv/one within half a minute")
    assert load_config(shell.home).shared == "/srv/one"
    assert load_config(shell.home).heads == ("a",)
    assert connect_shoal(second, {}).endswith("from its next start on: `shoal down`, then `shoal up`")
    assert load_config(shell.home).shared == "/srv/two"
    (shell.home / "options.json").write_text('{"engine": "local"}')
    assert "/srv/two up" not in connect_shoal(first, {}), "it works elsewhere"
    assert load_config(shell.home).shared == "/srv/two"


def test_forced_destroy_is_refused_while_shoal_would_restart_jobs(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.setattr("shoal.cli.cluster.connection.pid_holding", lambda _: 4711)
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@login", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))
    refused = shell("cluster", "destroy", "--yes", "--force")
    assert (refused.code, refused.err.splitlines()[-1]) == (3, "hint: `shoal down --jobs` first")
    assert "Shoal here is up (process 4711) and would start them again" in " ".join(refused.err.split())
    gone = shell("cluster", "destroy", "--yes")
    assert gone.code == 0
    assert "to return to this machine: `shoal down`, then `shoal connect local`" in gone.err


def test_missing_identity_file_is_reported_once_before_any_connection(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    done = shell(*CREATE, "--identity", "/no/key")
    assert (done.code, done.err.splitlines()[0]) == (2, "error: there is no key file /no/key here")
    assert not any(machine.scripts for machine in drawer.values())


def test_destroy_names_open_nodes_and_the_commands_to_close_them(
    shell: Shell, drawer: dict[str, FakeMachine]
) -> None:
    assert shell(*CREATE).code == 0
    (shell.home / "options.json").write_text('{"engine": "slurm"}')
    config = SlurmConfig(python="python3", ssh="ana@login", cluster="lab", heads=("a",))
    (shell.home / "slurm.json").write_bytes(msgspec.json.encode(config))
    desk = Mailbox(shell.home, SystemClock())
    orders = [change_task_spec(ORDER, node=node, nodes=("b", "a")) for node in ("b", "a")]
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


def test_shoal_on_another_cluster_does_not_block_destroy(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.setattr("shoal.cli.cluster.connection.pid_holding", lambda _: 4711)
    gone = shell("cluster", "destroy", "--yes", "--force")
    assert (gone.code, "shoal connect local" in gone.err) == (0, False)


def test_inventory_file_is_accepted(shell: Shell, drawer: dict[str, FakeMachine], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "cluster: lab\nslurm: {KillWait: 5}\nhosts:\n"
        "- {address: 10.0.0.1, roles: [controller, database]}\n- {address: 10.0.0.2, name: gpu1}\n"
    )
    assert shell("cluster", "create", "--file", str(file), "--no-connect").code == 0
    kept = load(shell.home / "clusters" / "lab.yaml")
    assert [host.label for host in kept.hosts] == ["a", "gpu1"]
    assert dict(kept.slurm) == {"KillWait": 5}


@pytest.mark.parametrize("expected", ["", ", is_unclean: true"])
def test_inventory_file_neither_clears_nor_sets_uncleaned_marks(
    shell: Shell, drawer: dict[str, FakeMachine], tmp_path: Path, expected: str
) -> None:
    file = tmp_path / "cluster.yaml"
    head = "cluster: lab\nhosts:\n- {address: 10.0.0.1, roles: [controller, database]}\n"
    file.write_text(f"{head}- {{address: 10.0.0.2}}\n- {{address: 10.0.0.3}}\n")
    create = ("cluster", "create", "--file", str(file), "--no-connect")
    assert shell(*create).code == 0
    path = shell.home / "clusters" / "lab.yaml"
    kept = load(path)
    left = kept.hosts[2].model_copy(update={"name": "c", "hardware": None, "is_unclean": True})
    save(kept.with_hosts([*kept.hosts[:2], left]), path)
    file.write_text(f"{head}- {{address: 10.0.0.2{expected}}}\n- {{address: 10.0.0.3}}\n")
    assert shell(*create).code == 0
    again = [(host.label, bool(host.hardware), host.is_unclean) for host in load(path).hosts]
    assert again == [("a", True, False), ("b", True, False), ("c", False, True)]


def test_missing_asyncssh_error_says_what_to_install(
    shell: Shell, drawer: dict[str, FakeMachine], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shell(*CREATE).code == 0
    monkeypatch.delitem(sys.modules, "shoal.cluster.ssh")
    monkeypatch.setitem(sys.modules, "asyncssh", None)
    for arguments in (CREATE, ("cluster", "destroy", "--yes")):
        result = shell(*arguments)
        assert (result.code, result.err.splitlines()[-1]) == (3, "hint: pip install 'shoal[cluster]'")
    assert "did not finish" not in shell("cluster", "show").out


def test_second_command_is_refused_while_one_runs(shell: Shell, drawer: dict[str, FakeMachine]) -> None:
    with exclusive_change(is_dry=False):
        second = shell(*CREATE)
        assert (second.code, second.err.splitlines()[0].split(":")[0]) == (3, "error")
        assert "another `shoal cluster` is changing a cluster" in second.err
        assert shell(*CREATE, "--dry-run").code == 0
    assert shell(*CREATE).code == 0
