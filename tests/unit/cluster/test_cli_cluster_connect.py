"""How `shoal cluster create` connects Shoal to the Slurm that it made, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cli import main
from shoal.cli.cluster_connect import connect_shoal
from shoal.cluster.inventory import Inventory
from tests.support.bare_machines import facts_of, found, three

NODE_PART = ("--python", "/usr/bin/python3", "--python-path", "/usr/local/lib/shoal-node")


def typed_by(monkeypatch: pytest.MonkeyPatch, code: int = 0) -> list[list[str]]:
    typed: list[list[str]] = []

    def run(argv: list[str]) -> int:
        typed.append(argv)
        return code

    monkeypatch.setattr(main, "run_command", run)
    return typed


def made(user: str | None, **more: object) -> Inventory:
    inventory = found(three(), facts_of(three().hosts))
    first, *others = inventory.hosts
    changed = first.model_copy(update={"user": user, **more})
    return inventory.model_copy(update={"hosts": (changed, *others)})


@pytest.mark.parametrize(("code", "said"), [(0, ""), (3, "-- Shoal was not connected to it (exit code 3)")])
def test_shoal_is_connected_by_the_command_a_person_would_type(
    monkeypatch: pytest.MonkeyPatch, code: int, said: str
) -> None:
    typed = typed_by(monkeypatch, code)
    assert connect_shoal(made("ana"), {}).startswith(said)
    assert typed == [["connect", "slurm", "--ssh", "ana@10.0.0.1", *NODE_PART]]


def test_a_shoal_that_is_up_is_not_connected_under_its_feet(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    monkeypatch.setattr("shoal.cli.cluster_connect.holder", lambda _: 4711)
    assert "after `shoal down`, `shoal cluster create --name lab`, `shoal up`" in connect_shoal(
        made("ana"), {}
    )
    assert typed == []


def test_shoal_is_not_connected_as_root_and_it_is_said_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    said = connect_shoal(made("root", port=2222), {})
    words = "`shoal connect slurm --ssh USER@10.0.0.1 '--ssh-options=-p 2222' --python /usr/bin/python3"
    assert words in said
    facts = facts_of(three().hosts)
    for user in ("root", None):  # nobody was named, and it was root who got in
        said = connect_shoal(made(user), facts)
        assert said.startswith("-- to connect, as a user who has an account on every machine: `shoal connect")
        assert "--ssh USER@10.0.0.1 " in said
    assert typed == []


def test_the_way_to_the_controller_is_told_to_who_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = typed_by(monkeypatch)
    inventory = made("ana", port=2222, jump="bo@bastion").model_copy(
        update={"identity": "/keys/my key", "known_hosts": "/keys/known"}
    )
    connect_shoal(inventory, {})
    options = "-p 2222 -J bo@bastion -i '/keys/my key' -o UserKnownHostsFile=/keys/known"
    assert typed[0][4] == f"--ssh-options={options}"


def test_nobody_is_connected_as_a_user_who_is_another_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    typed = typed_by(monkeypatch)
    facts = {a: replace(f, login=("ana", int(a[-1]))) for a, f in facts_of(three().hosts).items()}
    assert "jobs would run as somebody else" in connect_shoal(made("ana"), facts)
    assert typed == []
