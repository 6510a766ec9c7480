"""The scheduling policy: read from a file, checked, and recorded in the log.

The file is YAML or JSON with only the fields that differ from the shipped default. Without the record in the
log no decision could be made again.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import get_close_matches
from math import inf
from pathlib import Path

import msgspec

from shoal.control.actor import SHOAL
from shoal.control.capabilities import Records
from shoal.control.record import record_event
from shoal.errors import SpecError
from shoal.scheduler import Planner, Policy
from shoal.spec.yaml_tree import UnreadableYaml, plain_data, read_tree
from shoal.store import Tx

KIND_TEXT = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "fields and values",
    "null": "nothing",
}

BATCH_HINT = "what a job is that names no priority: `classes: [{name: batch, value: 0}, ...]`"


def read_policy(path: Path) -> Policy:
    """Read the policy. `SpecError` names the field that does not exist or cannot have the value."""
    try:
        root, repeated = read_tree(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"no policy at {path}: {error.strerror}", hint=f"ls {path.parent}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8", hint=f"file {path}") from error
    except UnreadableYaml as error:
        raise SpecError(f"{path}:{error.line}: {error.sentence}", hint=_example()) from None
    problems = [f"{path}:{line}: {sentence}" for line, sentence in repeated]
    data = {} if root is None else plain_data(root)
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a policy is fields and their values", hint=_example())
    problems += [f"{path}: {_unknown(str(name))}" for name in data if name not in Policy.__struct_fields__]
    if problems:
        raise SpecError(problems[0], problems=tuple(problems), hint=_example())
    try:
        policy = msgspec.convert(data, Policy)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {_plain_message(str(error))}", hint=_example()) from None
    _check(policy, path)
    return policy


def _check(policy: Policy, path: Path) -> None:
    """Refuse values of the right type that would stop the scheduler."""
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
            problem = f"`{name}` is a number from {least:g}, not `{value:g}`"
            raise SpecError(
                f"{path}: {problem}", hint=f"`{name}: {getattr(Policy(), name):g}` is the default"
            )
    for rack, watts in policy.power_caps.items():
        if not 0.0 <= watts < inf:
            problem = f"`power_caps.{rack}` is a number of watts from 0, not `{watts:g}`"
            raise SpecError(f"{path}: {problem}", hint="`power_caps: {r1: 40000}`")
    _check_classes(policy, path)


def _check_classes(policy: Policy, path: Path) -> None:
    """Check the priority classes. A job without a priority has priority 0 and is `batch`, so no other class
    may claim it.
    """
    for field in ("name", "value"):
        counted = Counter(getattr(priority_class, field) for priority_class in policy.classes)
        twice = next((value for value, count in counted.items() if count > 1), None)
        if twice is not None:
            raise SpecError(f"{path}: `classes` has {field} `{twice}` twice", hint=BATCH_HINT)
    batch = next(
        (priority_class for priority_class in policy.classes if priority_class.name == "batch"), None
    )
    if batch is None:
        names = ", ".join(f"`{priority_class.name}`" for priority_class in policy.classes)
        raise SpecError(f"{path}: `classes` is {names or 'empty'}, without `batch`", hint=BATCH_HINT)
    if batch.value != 0:
        raise SpecError(f"{path}: `batch` has value {batch.value}, not 0", hint=BATCH_HINT)


def _unknown(name: str) -> str:
    near = get_close_matches(name, Policy.__struct_fields__, 1)
    return f"no policy field `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")


def _plain_message(message: str) -> str:
    """Rewrite msgspec's "Expected `float`, got `str` - at `$.half_life_s`" in the terms of the file."""
    lacking = re.fullmatch(r"Object missing required field `(\w+)` - at `\$\.(.+)`", message)
    if lacking is not None:
        return f"`{lacking[2]}` lacks `{lacking[1]}`"
    mismatch = re.fullmatch(r"Expected `(\w+)`, got `(\w+)` - at `\$\.(.+)`", message)
    if mismatch is None:
        return message
    wanted, got = (KIND_TEXT.get(mismatch[i], f"`{mismatch[i]}`") for i in (1, 2))
    return f"`{mismatch[3]}` takes {wanted}, not {got}"


def _example() -> str:
    return f"the fields are {', '.join(f'`{name}`' for name in Policy.__struct_fields__)}"


POLICY_KEY = "policy"


async def declare_policy(records: Records, planner: Planner) -> None:
    """Record the policy if it differs from the recorded one. May be repeated."""
    policy = msgspec.to_builtins(planner.policy)
    text = msgspec.json.encode(policy, order="sorted").decode()

    def change(tx: Tx) -> None:
        tx.meta.set(POLICY_KEY, text)
        record_event(tx, "policy.set", records.clock.now(), SHOAL, data=policy)

    if await records.store.read(lambda tx: tx.meta.get(POLICY_KEY)) != text:
        await records.store.write(change)
