"""A policy written in a file: YAML or JSON, only the fields that differ from the shipped default."""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from math import inf
from pathlib import Path

import msgspec

from shoal.errors import SpecError
from shoal.scheduler import Policy
from shoal.spec.yaml_tree import Unreadable, plain, read_tree

KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "fields and values",
    "null": "nothing",
}

BATCH = "what a job is that names no priority: `classes: [{name: batch, value: 0}, ...]`"


def read_policy(path: Path) -> Policy:
    """`SpecError` names the field that does not exist, or cannot have the value."""
    try:
        root, repeated = read_tree(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"no policy at {path}: {error.strerror}", hint=f"ls {path.parent}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8", hint=f"file {path}") from error
    except Unreadable as wrong:
        raise SpecError(f"{path}:{wrong.line}: {wrong.sentence}", hint=_example()) from None
    problems = [f"{path}:{line}: {sentence}" for line, sentence in repeated]
    data = {} if root is None else plain(root)
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a policy is fields and their values", hint=_example())
    problems += [f"{path}: {_unknown(str(name))}" for name in data if name not in Policy.__struct_fields__]
    if problems:
        raise SpecError(problems[0], problems=tuple(problems), hint=_example())
    try:
        policy = msgspec.convert(data, Policy)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {_plainly(str(error))}", hint=_example()) from None
    _check(policy, path)
    return policy


def _check(policy: Policy, path: Path) -> None:
    """What has the right kind and would stop the scheduler."""
    for name, least in (
        ("patience_s", 0.0),
        ("patience_factor", 0.0),
        ("patience_most_s", 0.0),
        ("half_life_s", 1.0),
        ("max_evictions", 0),
        ("settle_s", 0.0),
        ("grow_gain", 0.0),
    ):
        value = getattr(policy, name)
        if not least <= value < inf:
            told = f"`{name}` is a number from {least:g}, not `{value:g}`"
            raise SpecError(f"{path}: {told}", hint=f"`{name}: {getattr(Policy(), name):g}` is the default")
    for rack, watts in policy.power_caps.items():
        if not 0.0 <= watts < inf:
            told = f"`power_caps.{rack}` is a number of watts from 0, not `{watts:g}`"
            raise SpecError(f"{path}: {told}", hint="`power_caps: {r1: 40000}`")
    _check_classes(policy, path)


def _check_classes(policy: Policy, path: Path) -> None:
    """A job that says nothing has priority 0 and is `batch`: in no other class may it find itself."""
    for field in ("name", "value"):
        counted = Counter(getattr(one, field) for one in policy.classes)
        twice = next((value for value, count in counted.items() if count > 1), None)
        if twice is not None:
            raise SpecError(f"{path}: `classes` has {field} `{twice}` twice", hint=BATCH)
    batch = next((one for one in policy.classes if one.name == "batch"), None)
    if batch is None:
        known = ", ".join(f"`{one.name}`" for one in policy.classes)
        raise SpecError(f"{path}: `classes` is {known or 'empty'}, without `batch`", hint=BATCH)
    if batch.value != 0:
        raise SpecError(f"{path}: `batch` has value {batch.value}, not 0", hint=BATCH)


def _unknown(name: str) -> str:
    near = get_close_matches(name, Policy.__struct_fields__, 1)
    return f"no policy field `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")


def _plainly(told: str) -> str:
    """Msgspec's "Expected `float`, got `str` - at `$.half_life_s`" in words of the file."""
    lacking = re.fullmatch(r"Object missing required field `(\w+)` - at `\$\.(.+)`", told)
    if lacking is not None:
        return f"`{lacking[2]}` lacks `{lacking[1]}`"
    found = re.fullmatch(r"Expected `(\w+)`, got `(\w+)` - at `\$\.(.+)`", told)
    if found is None:
        return told
    wanted, got = (KINDS.get(found[i], f"`{found[i]}`") for i in (1, 2))
    return f"`{found[3]}` takes {wanted}, not {got}"


def _example() -> str:
    return f"the fields are {', '.join(f'`{name}`' for name in Policy.__struct_fields__)}"
