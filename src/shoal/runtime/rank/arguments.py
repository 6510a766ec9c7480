"""Check the arguments of a program before anything starts. Each error has the value and what to write."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError


def whole_number(name: str, value: Any, minimum: int) -> int:
    """Return the value as an integer. Integers of NumPy and torch are accepted.

    `TypeError`: it is no integer. `SpecError`: it is below `minimum`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name}={value!r:.60} is not a whole number; pass an int from {minimum} on"
        ) from None
    if number < minimum:
        raise SpecError(f"{name}={number} is too small; pass {minimum} or more")
    return number


def check_number(name: str, value: object) -> None:
    """Raise `TypeError` unless it is one number. Does not read the value, which a GPU may still compute."""
    if not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r:.60} is of type {kind}; pass a number, or a tensor of one element")
    if (count := math.prod(getattr(value, "shape", ()))) != 1:
        raise TypeError(f"{name} has {count} elements; pass one number, such as {name}.mean()")


def check_parts(parts: object) -> None:
    """Raise `TypeError` unless it maps names to objects with a state."""
    if not isinstance(parts, Mapping):
        raise TypeError(f"the parts are {parts!r:.60}; pass a mapping such as {{'model': model}}")
    for name, part in parts.items():
        if not isinstance(name, str):
            raise TypeError(f"a part is named {name!r:.60}; name it by a string")
        if not (
            callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
        ):
            raise TypeError(
                f"part {name!r:.60} is {part!r:.60}, without `state_dict` and `load_state_dict`; "
                "pass a module, an optimizer, a scheduler, a sampler, or give it both"
            )
