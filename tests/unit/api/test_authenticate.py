"""The hint for a caller without a valid token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.api.authenticate import Authenticator
from shoal.errors import Unauthenticated
from shoal.settings import Settings
from tests.support.planes.world import open_plane

pytestmark = pytest.mark.anyio


async def test_hint_about_a_lost_token_names_existing_commands(tmp_path: Path) -> None:
    async with open_plane(tmp_path, is_running=False) as plane:
        core = plane.core

        async def hint(settings: Settings) -> str:
            with pytest.raises(Unauthenticated) as refused:
                await Authenticator(core.records, core.sealing, settings).identify("shl_nobody")
            return refused.value.hint or ""

        alone, database = core.settings, "postgresql://db/shoal"
        several = replace(alone, shared=tmp_path / "shared", database_url=database)
        assert "`shoal login local --forget`, `shoal down`, `shoal up`" in await hint(alone)
        assert "--forget" not in await hint(several), "a usual start makes none if several share a directory"
        assert "`shoal token create`" in await hint(several)
        assert "`shoal down` and `shoal up --admin-token`" in await hint(several)
