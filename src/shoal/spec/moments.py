"""Moments as people write them: `now`, `14:00`, `2026-11-16T08:00`, or how long from now: `2h`.

In UTC unless an offset is written, as all of Shoal tells times. Raises `ValueError`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from shoal.spec.quantity import MAX_TEXT, parse_seconds
from shoal.spec.wording import show

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
        raise ValueError(f"{show(text)} is not a day and a time that there are") from None
