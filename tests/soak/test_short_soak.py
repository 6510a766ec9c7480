"""The soak in short; `make soak KILLS=1000` is the long one."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.soak.audit import broken_promises
from tests.soak.killer import KILL_FRACTIONS
from tests.soak.run import soak

KILLS = 16


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="killing inside sandboxes takes root")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="there is no bubblewrap: `apt install bubblewrap`")
def test_sixteen_kills_under_mixed_load_lose_nothing() -> None:
    with tempfile.TemporaryDirectory(prefix="shoal-soak-", ignore_cleanup_errors=True) as root:
        found = soak(Path(root), KILLS, seed=KILLS)
    assert not broken_promises(found), found
    killed = {kind: found.get(f"killed: {kind}", 0) for kind in KILL_FRACTIONS}
    assert sum(killed.values()) >= KILLS
    assert sum(map(bool, killed.values())) > len(killed) / 2, killed
    assert found["jobs accepted"] >= KILLS // 2
