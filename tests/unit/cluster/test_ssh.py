"""Failed connections: silence is one thing, a refused login another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import asyncssh
import pytest

from shoal.cluster.inventory import InventoryHost
from shoal.cluster.ssh import Access, Ssh, _Client
from shoal.errors import EngineRefused, EngineUnreachable, ShoalError


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (asyncssh.PermissionDenied("no more methods"), EngineRefused),
        (asyncssh.HostKeyNotVerifiable("changed"), EngineRefused),
        (asyncssh.KeyImportError("no key"), EngineRefused),
        (asyncssh.ConnectionLost("reset"), EngineUnreachable),
        (ConnectionRefusedError("refused"), EngineUnreachable),
        (TimeoutError(), EngineUnreachable),
    ],
)
async def test_machine_that_refuses_the_login_is_not_silent(
    wrong: Exception, error: type[ShoalError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise wrong

    monkeypatch.setattr(asyncssh, "connect", connect)
    with pytest.raises(error) as refused:
        await Ssh(Access(known_hosts=tmp_path / "known")).connect(InventoryHost(address="10.0.0.3"))
    assert type(refused.value) is error
    assert refused.value.hint


@pytest.mark.parametrize(
    ("jump", "hint"),
    [
        ("bastion", "ssh-copy-id -o ProxyJump=bastion ana@10.0.0.3, or name a key with `--identity`"),
        ("eve@b:2022", "ssh-copy-id -o ProxyJump=eve@b:2022 ana@10.0.0.3, or name a key with `--identity`"),
    ],
)
async def test_ssh_copy_id_hint_uses_the_same_route(
    jump: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(address: str, **__: object) -> object:
        if address == "10.0.0.3":
            raise asyncssh.PermissionDenied("no more methods")
        return None

    monkeypatch.setattr(asyncssh, "connect", connect)
    with pytest.raises(EngineRefused) as refused:
        await Ssh(Access(known_hosts=tmp_path / "known")).connect(
            InventoryHost(address="10.0.0.3", user="ana", jump=jump)
        )
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("wrong", "expected", "hint"),
    [
        (
            asyncssh.PermissionDenied("no more methods"),
            "10.0.0.3 does not take the key /keys/one for user `ana`",
            "ssh-copy-id -i /keys/one -p 2222 ana@10.0.0.3, or name another key with `--identity`",
        ),
        (TimeoutError(), "10.0.0.3 cannot be reached", "ssh -i /keys/one -p 2222 ana@10.0.0.3 true"),
    ],
)
async def test_login_error_names_the_user_and_key_tried(
    wrong: Exception, expected: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise wrong

    monkeypatch.setattr(asyncssh, "connect", connect)
    access = Access(identity="/keys/one", known_hosts=tmp_path / "known")
    with pytest.raises(ShoalError) as refused:
        await Ssh(access).connect(InventoryHost(address="10.0.0.3", user="ana", port=2222))
    assert refused.value.message.startswith(expected)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("uid", "as_root"), [("0\n", "ssh ana@10.0.0.3"), ("1000\n", "ssh ana@10.0.0.3 sudo")]
)
async def test_root_commands_are_printed_with_sudo_for_other_users(
    uid: str, as_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Connection:
        async def run(self, _: str, **__: object) -> SimpleNamespace:
            return SimpleNamespace(stdout=uid)

    async def connect(*_: object, **__: object) -> Connection:
        return Connection()

    monkeypatch.setattr(asyncssh, "connect", connect)
    access = Access(known_hosts=tmp_path / "known")
    machine = await Ssh(access).connect(InventoryHost(address="10.0.0.3", user="ana"))
    assert (machine.typed, machine.as_root) == ("ssh ana@10.0.0.3", as_root)


@pytest.mark.parametrize(
    ("odd", "expected", "hint"),
    [
        (
            b"# fine\nnode-a\n",
            "line 2 of {file} cannot be read: Invalid known hosts entry",
            "sed -n 2p {file}",
        ),
        (b"\n\n@mine a b\n", "line 3 of {file} cannot be read", "sed -n 3p {file}"),
        (None, "{file} cannot be read: [Errno 21] Is a directory", "ls -l {file}"),
    ],
)
async def test_unreadable_host_keys_are_an_error_with_a_hint(
    odd: bytes | None, expected: str, hint: str, tmp_path: Path
) -> None:
    file = tmp_path / "known"
    file.mkdir() if odd is None else file.write_bytes(odd)
    with pytest.raises(EngineRefused) as refused:
        await Ssh(Access(known_hosts=file)).connect(InventoryHost(address="10.0.0.3"))
    assert refused.value.message.startswith(expected.format(file=file))
    assert (refused.value.hint or "").startswith(hint.format(file=file))
    assert "`--known-hosts`" in (refused.value.hint or "")


@pytest.mark.parametrize("before", ["", "# mine", "# mine\n"])
def test_a_new_host_key_has_a_line_of_its_own(before: str, tmp_path: Path) -> None:
    file = tmp_path / "known"
    file.write_text(before)
    key = asyncssh.generate_private_key("ssh-ed25519").convert_to_public()
    client = _Client(Access(known_hosts=file, accepts_new_keys=True), asyncssh.import_known_hosts(""))
    assert client.validate_host_public_key("10.0.0.3", "10.0.0.3", 22, key)
    lines = file.read_text().splitlines()
    assert lines[:-1] == ([before.strip()] if before else [])
    assert lines[-1].startswith("10.0.0.3 ssh-ed25519 ")
