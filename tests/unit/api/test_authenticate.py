"""The hint for a caller without a valid token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.api.authenticate import Authenticator
from shoal.errors import Unauthenticated
from tests.support.planes.world import open_plane

pytestmark = pytest.mark.anyio


async def test_hint_about_a_lost_token_names_existing_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_plane(tmp_path, is_running=False) as plane:

        async def hint() -> str:
            with pytest.raises(Unauthenticated) as refused:
                await Authenticator(plane).identify("shl_nobody")
            return refused.value.hint or ""

        assert "`shoal login local --forget`, `shoal down`, `shoal up`" in await hint()
        one, database = plane.core.settings, "postgresql://db/shoal"
        several = replace(one, shared=tmp_path / "shared", database_url=database)
        monkeypatch.setattr(plane.core, "settings", several)
        assert "--forget" not in await hint(), "a usual start makes none where several share a directory"
        assert "`shoal token create`" in await hint()
        assert "`shoal down` and `shoal up --admin-token`" in await hint()
