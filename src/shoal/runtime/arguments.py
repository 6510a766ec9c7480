"""Look at what a program hands in before anything is begun. Each *no* says the value and what to write."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

from shoal.errors import SpecError


def whole(name: str, value: Any, least: int) -> int:
    """The value as an integer; NumPy's and torch's are some too.

    `TypeError`: it is none. `SpecError`: it is below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r:.60} is not a whole number; pass an int from {least} on") from None
    if number < least:
        raise SpecError(f"{name}={number} is too small; pass {least} or more")
    return number


def check_number(name: str, value: object) -> None:
    """`TypeError`: it is not one number. Reads none: that of a tensor may still be computed."""
    if not hasattr(value, "__float__"):
        kind = type(value).__name__
        raise TypeError(f"{name}={value!r:.60} is of type {kind}; pass a number, or a tensor of one element")
    if (count := math.prod(getattr(value, "shape", ()))) != 1:
        raise TypeError(f"{name} has {count} elements; pass one number, such as {name}.mean()")


def check_parts(parts: object) -> None:
    """`TypeError`: they are not names of what has a state."""
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
