"""So many GPUs and CPUs as people type them: `64`, or `gpus=64,cpus=512`."""

from __future__ import annotations

import re

from shoal.spec.wording import show

UNITS = ("gpus", "cpus")
_FORM = "write a number of GPUs, or `gpus=64,cpus=512`"


def read_devices(text: str) -> dict[str, int | float]:
    """What is named, by device. `ValueError` says what is wrong with the text."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return {"gpus": int(text)}
    found: dict[str, int | float] = {}
    for part in text.split(","):
        unit, equals, amount = (word.strip() for word in part.partition("="))
        if not equals or unit not in UNITS or unit in found:
            raise ValueError(f"{show(text)} is no amount of devices; {_FORM}")
        found[unit] = _amount(unit, amount, text)
    return found


def write_devices(devices: dict[str, int | float | None] | None) -> str:
    """As it is typed, GPUs alone as a number; `-` for nothing."""
    named = {unit: amount for unit in UNITS if (amount := (devices or {}).get(unit)) is not None}
    if list(named) == ["gpus"]:
        return f"{named['gpus']:g}"
    return ",".join(f"{unit}={amount:.15g}" for unit, amount in named.items()) or "-"


def _amount(unit: str, amount: str, text: str) -> int | float:
    if re.fullmatch(r"[0-9]{1,9}", amount):
        return int(amount)
    if unit == "cpus" and re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,3}", amount):
        return float(amount)
    raise ValueError(f"{show(text)}: {show(amount)} is no number of {unit.upper()[:-1]}s; {_FORM}")
