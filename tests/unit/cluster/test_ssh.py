"""What becomes of a connection that did not come about: silence is one thing, a closed door another."""

from __future__ import annotations

from pathlib import Path

import asyncssh
import pytest

from shoal.cluster.inventory import Host
from shoal.cluster.ssh import Access, Ssh
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
async def test_who_does_not_let_us_in_is_not_silent(
    wrong: Exception, error: type[ShoalError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect(*_: object, **__: object) -> None:
        raise wrong

    monkeypatch.setattr(asyncssh, "connect", connect)
    with pytest.raises(error) as refused:
        await Ssh(Access(known_hosts=tmp_path / "known")).connect(Host(address="10.0.0.3"))
    assert type(refused.value) is error
    assert refused.value.hint
