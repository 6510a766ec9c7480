"""What a keeper makes of the order that it fetched."""

from __future__ import annotations

import pytest

from shoal.runtime.keeper import Keeper
from shoal.wire import Summons
from tests.support.shares import an_order


@pytest.mark.parametrize("given", ["", "3,5"])
def test_keepers_supervisor_has_no_standby_for_nobody_there_would_call_it(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("DEVICES_GIVEN", given)
    summons = Summons(
        attempt_id="att_1", urls=("https://a:1",), ca="", ticket="t", devices_from="DEVICES_GIVEN"
    )
    fitted = Keeper(summons, "node-1")._fitted(an_order(has_standby=True, gpu_ids=(0, 1)))
    assert not fitted.has_standby
    assert fitted.gpu_ids == ((3, 5) if given else (0, 1))
