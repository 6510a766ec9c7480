"""Amounts as people write them: bytes (`32GB`, `512MiB`), seconds (`90m`, `1h30m`, `1:30:00`), numbers.

Parsed here and nowhere else. A bare number is bytes or seconds. An amount that can be read in two ways
(`32G`: of 1000 or of 1024?) is refused with both spellings, never guessed. Raises `ValueError`.

Moments: `now`, `14:00`, `2026-11-16T08:00`, or a duration from now: `2h`. They are in UTC unless an offset is
written, like all times in Shoal.

Amounts of GPUs and CPUs: `64`, or `gpus=64,cpus=512`.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from shoal.spec.error_text import show

MAX_TEXT = 64
"""Characters in an amount. A longer text is a mistake, and not worth the arithmetic."""

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
_BYTE_UNIT_OF = {unit.lower(): size for unit, size in BYTE_UNITS.items()}
SECOND_UNITS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
    "w": Decimal(7 * 86400),
}

NUMBER = r"[0-9]+(?:\.[0-9]+)?"
BYTES_PATTERN = rf"{NUMBER} ?(?:[kKmMgGtTpP]i?)?[bB]"
SECONDS_PATTERN = rf"(?:{NUMBER}(?:ms|[smhdw]))+|[0-9]+:[0-5][0-9]:[0-5][0-9]"

_BYTES = re.compile(rf"({NUMBER})\s?([A-Za-z]*)")
_SECONDS_PART = re.compile(rf"({NUMBER})(ms|[smhdw])")
_SECONDS = re.compile(rf"(?:{NUMBER}(?:ms|[smhdw]))+")
_CLOCK = re.compile(r"([0-9]+):([0-5][0-9]):([0-5][0-9])")


def parse_bytes(value: object) -> int:
    """Whole bytes, rounded up, so that no job gets less than it asked for."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.ceil(_finite(value))
    match = _BYTES.fullmatch(_text(value, "an amount such as `32GB` or `512MiB`"))
    if match is None:
        raise ValueError(f"{show(value)} is not an amount such as `32GB` or `512MiB`")
    number, unit = match.groups()
    if not unit:
        return math.ceil(Decimal(number))
    size = _BYTE_UNIT_OF.get(unit.lower())
    if size is None:
        raise ValueError(f"{show(value)} has {_unit_problem(number, unit)}")
    return math.ceil(Decimal(number) * size)


def _unit_problem(number: str, unit: str) -> str:
    letter = unit[0].upper()
    if unit.lower() in {f"{letter.lower()}", f"{letter.lower()}i"} and letter in "KMGTP":
        return f"an unclear unit; write `{number}{letter}B` (of 1000) or `{number}{letter}iB` (of 1024)"
    return f"an unknown unit {show(unit)}; the units are {' '.join(BYTE_UNITS)}"


def parse_seconds(value: object) -> float:
    """Seconds: a number, a sum such as `1h30m`, or `hours:minutes:seconds`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(_finite(value)) + 0.0  # -0.0 is 0.0, in writing too
    text = _text(value, "a time such as `90s`, `1h30m` or `2d`")
    if re.fullmatch(NUMBER, text):
        return float(text)
    if clock := _CLOCK.fullmatch(text):
        hours, minutes, seconds = (int(part) for part in clock.groups())
        return float(hours * 3600 + minutes * 60 + seconds)
    if _SECONDS.fullmatch(text):
        parts = _SECONDS_PART.findall(text)
        units = [unit for _, unit in parts]
        if len(set(units)) == len(units):
            return float(sum(Decimal(number) * SECOND_UNITS[unit] for number, unit in parts))
    raise ValueError(f"{show(value)} is not a time such as `90s`, `1h30m`, `2d` or `12:00:00`")


def parse_whole(value: object) -> int:
    """A whole number, also as text; a number with a fraction is refused, not rounded."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value.strip()):
        return int(value)
    raise ValueError(f"{show(value)} is not a whole number")


def parse_number(value: object) -> float:
    """A number of zero or more, also as text, that may have a fraction."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(_finite(value))
    if isinstance(value, str) and len(value) <= MAX_TEXT and re.fullmatch(NUMBER, value.strip()):
        return float(value)
    raise ValueError(f"{show(value)} is not a number")


def format_bytes(value: int) -> str:
    """The bytes in the largest unit that is exact: `1MiB`, `32GB`."""
    for unit, size in sorted(BYTE_UNITS.items(), key=lambda item: -item[1]):
        if value >= size and value % size == 0:
            return f"{value // size}{unit}"
    return f"{value}B"


def format_seconds(value: float) -> str:
    """The time in the largest unit that is exact: `1h`, `90s`, `365d`."""
    for unit in ("d", "h", "m"):
        size = float(SECOND_UNITS[unit])
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}s"


def _text(value: object, kind: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{show(value)} is not {kind}")
    return value.strip()


def _finite(value: float) -> float:
    """Refuse not-a-number, infinity, and whole numbers that no float can hold."""
    try:
        is_finite = math.isfinite(value)
    except OverflowError:
        is_finite = False
    if not is_finite:
        raise ValueError(f"{show(value)} is not a number Shoal can count with")
    return value


MOMENT = "a moment such as `14:00`, `2026-11-16T08:00` or `6h`"
CLOCK_PATTERN = r"([01][0-9]|2[0-3]):[0-5][0-9]"
DATE_PATTERN = rf"[0-9]{{4}}-[0-9]{{2}}-[0-9]{{2}}[T ]{CLOCK_PATTERN}(:[0-5][0-9])?(Z|[+-]{CLOCK_PATTERN})?"


def parse_moment(value: object, now: float) -> float:
    """Seconds since 1970. A time of day is the next one; a duration counts from `now`."""
    text = value.strip() if isinstance(value, str) else value
    if text == "now":
        return now
    if isinstance(text, str) and len(text) <= MAX_TEXT:
        if re.fullmatch(CLOCK_PATTERN, text):
            return _next(text, now)
        if re.fullmatch(DATE_PATTERN, text):
            return _dated(text)
    try:
        return now + parse_seconds(text)
    except ValueError:
        raise ValueError(f"{show(value)} is not {MOMENT}") from None


def _next(clock: str, now: float) -> float:
    today = datetime.fromtimestamp(now, UTC)
    hour, minute = (int(part) for part in clock.split(":"))
    then = today.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return (then if then.timestamp() > now else then + timedelta(days=1)).timestamp()


def _dated(text: str) -> float:
    try:
        then = datetime.fromisoformat(text)
        return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(f"{show(text)} is not an existing day and time") from None


UNITS = ("gpus", "cpus")
_FORM = "write a number of GPUs, or `gpus=64,cpus=512`"


def read_devices(text: str) -> dict[str, int | float]:
    """Return the amounts by device. Raises `ValueError` with what is wrong with the text."""
    if re.fullmatch(r"[0-9]{1,9}", text.strip()):
        return {"gpus": int(text)}
    amounts: dict[str, int | float] = {}
    for part in text.split(","):
        unit, equals, amount = (word.strip() for word in part.partition("="))
        if not equals or unit not in UNITS or unit in amounts:
            raise ValueError(f"{show(text)} is not an amount of devices; {_FORM}")
        amounts[unit] = _amount(unit, amount, text)
    return amounts


def write_devices(devices: dict[str, int | float | None] | None) -> str:
    """The text that a person would type: GPUs alone as a number; `-` for nothing."""
    named = {unit: amount for unit in UNITS if (amount := (devices or {}).get(unit)) is not None}
    if list(named) == ["gpus"]:
        return f"{named['gpus']:g}"
    return ",".join(f"{unit}={amount:.15g}" for unit, amount in named.items()) or "-"


def _amount(unit: str, amount: str, text: str) -> int | float:
    if re.fullmatch(r"[0-9]{1,9}", amount):
        return int(amount)
    if unit == "cpus" and re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,3}", amount):
        return float(amount)
    raise ValueError(f"{show(text)}: {show(amount)} is not a number of {unit.upper()[:-1]}s; {_FORM}")
