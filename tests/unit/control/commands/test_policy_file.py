"""Policy files: what they may contain, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.control.commands.policy import read_policy
from shoal.errors import SpecError

URGENT = "{name: urgent, value: 90, can_preempt: true}"


def test_file_says_only_what_differs_from_the_default(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(f"power_caps: {{r1: 40000}}\nclasses: [{{name: batch, value: 0}}, {URGENT}]\n")
    policy = read_policy(path)
    assert policy.power_caps == {"r1": 40_000.0}
    assert [priority_class.name for priority_class in policy.classes] == ["batch", "urgent"]
    assert policy.patience_s == 600.0


@pytest.mark.parametrize(
    "text,message",
    [
        (f"classes: [{URGENT}]", "`classes` is `urgent`, without `batch`"),
        ("classes: []", "`classes` is empty, without `batch`"),
        (f"classes: [{{name: batch, value: 10}}, {URGENT}]", "`batch` has value 10, not 0"),
        ("classes: [{name: batch, value: 0}, {name: odd, value: 0}]", "`classes` has value `0` twice"),
        (f"classes: [{{name: batch, value: 0}}, {URGENT}, {URGENT}]", "`classes` has name `urgent` twice"),
        ("classes: [{value: 1}]", "`classes[0]` lacks `name`"),
        ("half_life_s: week", "`half_life_s` takes a number, not text"),
        ("power_caps: {r1: -5}", "`power_caps.r1` is a number of watts from 0, not `-5`"),
        ("power_caps: {r1: .inf}", "`power_caps.r1` is a number of watts from 0, not `inf`"),
    ],
)
def test_invalid_policy_is_refused_with_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SpecError) as error:
        read_policy(path)
    assert str(error.value) == f"{path}: {message}"
    assert error.value.hint


def test_power_cap_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("power_caps: {r1: lots}\n")
    with pytest.raises(SpecError, match="number, not text"):
        read_policy(path)
