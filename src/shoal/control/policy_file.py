"""A policy written in a file: YAML or JSON, only the fields that differ from the shipped default."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

import msgspec

from shoal.errors import SpecError
from shoal.scheduler import Policy
from shoal.spec.yaml_tree import Unreadable, plain, read_tree


def read_policy(path: Path) -> Policy:
    """`SpecError` names the field that does not exist, or cannot have the value."""
    try:
        root, repeated = read_tree(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"no policy at {path}: {error.strerror}", hint=f"ls {path.parent}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: not UTF-8", hint=f"file {path}") from error
    except Unreadable as wrong:
        raise SpecError(f"{path}:{wrong.line}: {wrong.sentence}") from None
    problems = [f"{path}:{line}: {sentence}" for line, sentence in repeated]
    data = {} if root is None else plain(root)
    if not isinstance(data, dict):
        raise SpecError(f"{path}: a policy is fields and their values", hint=_example())
    problems += [f"{path}: {_unknown(str(name))}" for name in data if name not in Policy.__struct_fields__]
    if problems:
        raise SpecError(problems[0], problems=tuple(problems), hint=_example())
    try:
        return msgspec.convert(data, Policy)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: {error}", hint=_example()) from None


def _unknown(name: str) -> str:
    near = get_close_matches(name, Policy.__struct_fields__, 1)
    return f"no policy field `{name}`" + (f"; did you mean `{near[0]}`?" if near else "")


def _example() -> str:
    return f"the fields are {', '.join(f'`{name}`' for name in Policy.__struct_fields__)}"
