"""How `shoal cluster create` connects Shoal to the Slurm that it made, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cli import main
from shoal.cli.cluster.connection import connect_shoal
from shoal.cluster.inventory import Inventory
from tests.support.fakes.machines import facts_of, three_hosts, with_hardware

NODE_PART = ("--python", "/usr/bin/python3", "--python-path", "/usr/local/lib/shoal-node")


def typed_by(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list[list[str]]:
    typed: list[list[str]] = []

    def run(argv: list[str]) -> int:
        typed.append(argv)
        return code

    monkeypatch.setattr(main, "run_command", run)
    return typed


def inventory_of(user: str | None, **more: object) -> Inventory:
    inventory = with_hardware(three_hosts(), facts_of(three_hosts().hosts))
    first, *others = inventory.hosts
    changed = first.model_copy(update={"user": user, **more})
    return inventory.model_copy(update={"hosts": (changed, *others)})


@pytest.mark.parametrize(
    ("code", "expected"), [(0, ""), (3, "-- Shoal was not connected to it (exit code 3)")]
)
def test_shoal_is_connected_by_the_command_a_person_would_type(
    monkeypatch: pytest.MonkeyPatch, code: int, expected: str
) -> None:
    typed = typed_by(monkeypatch, code)
    assert connect_shoal(inventory_of("ana"), {}).startswith(expected)
    assert typed == [["connect", "slurm", "--ssh", "ana@10.0.0.1", *NODE_PART]]


def test_running_shoal_is_not_reconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    monkeypatch.setattr("shoal.cli.cluster.connection.pid_holding", lambda _: 4711)
    assert "to connect it: `shoal down`, `shoal cluster create --name lab`, `shoal up`" in connect_shoal(
        inventory_of("ana"), {}
    )
    assert typed == []


def test_shoal_is_not_connected_as_root_and_the_command_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    output = connect_shoal(inventory_of("root", port=2222), {})
    arguments = "`shoal connect slurm --ssh USER@10.0.0.1 '--ssh-options=-p 2222' --python /usr/bin/python3"
    assert arguments in output
    facts = facts_of(three_hosts().hosts)
    for user in ("root", None):  # no user was named, and root logged in
        output = connect_shoal(inventory_of(user), facts)
        assert output.startswith(
            "-- to connect, as a user who has an account on every machine: `shoal connect"
        )
        assert "--ssh USER@10.0.0.1 " in output
    assert typed == []


def test_connect_command_has_the_ssh_options_of_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    inventory = inventory_of("ana", port=2222, jump="bo@bastion").model_copy(
        update={"identity": "/keys/my key", "known_hosts": "/keys/known"}
    )
    connect_shoal(inventory, {})
    options = "-p 2222 -J bo@bastion -i '/keys/my key' -o UserKnownHostsFile=/keys/known"
    assert typed[0][4] == f"--ssh-options={options}"


def test_shoal_is_not_connected_as_a_user_whose_uid_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = typed_by(monkeypatch)
    facts = {a: replace(f, login=("ana", int(a[-1]))) for a, f in facts_of(three_hosts().hosts).items()}
    assert "jobs would run as another user" in connect_shoal(inventory_of("ana"), facts)
    assert typed == []
