"""A policy that cannot be read or kept is refused in words of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.policy_file import read_policy
from shoal.errors import SpecError


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("half_life_s: week", "`half_life_s` takes a number, not text"),
        ("patience_s: -1", "`patience_s` is a number from 0, not `-1`"),
        ("classes: [{value: 1}]", "`classes[0]` lacks `name`"),
        ("power_caps: {r1: -5}", "`power_caps.r1` is so many watts from 0, not `-5`"),
        ("classes: []", "`classes` is empty"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_policy(path)
    assert told in caught.value.message
    assert caught.value.hint
