"""Task specs from the fields of their parts: a test names only what it is about."""

from __future__ import annotations

from typing import Any, get_type_hints

import msgspec

from shoal.wire import TaskSpec

PARTS: dict[str, type[msgspec.Struct]] = get_type_hints(TaskSpec)
PART_OF = {field: name for name, part in PARTS.items() for field in part.__struct_fields__}
"""The part that has this field. No two parts have fields of one name."""
assert len(PART_OF) == sum(len(part.__struct_fields__) for part in PARTS.values())


def task_spec_of(**fields: Any) -> TaskSpec:
    """Make a task spec: each field goes to the part that has it."""
    grouped = _by_part(fields)
    return TaskSpec(**{name: part(**grouped[name]) for name, part in PARTS.items()})  # type: ignore[arg-type]


def change_task_spec(task_spec: TaskSpec, **fields: Any) -> TaskSpec:
    """Replace fields of a task spec's parts."""
    replace = msgspec.structs.replace
    parts = {name: replace(getattr(task_spec, name), **part) for name, part in _by_part(fields).items()}
    return replace(task_spec, **parts)


def _by_part(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for field, value in fields.items():
        result[PART_OF[field]][field] = value
    return result
