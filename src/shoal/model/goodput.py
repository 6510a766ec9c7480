"""How much of the time a job made the steps that it makes undisturbed. Pure."""

from __future__ import annotations


def rate(
    steps: int, step_s: float, began_at: float, newest_at: float, ends_at: float
) -> tuple[float | None, float | None]:
    """What so many steps, the last of them made at `newest_at`, take undisturbed over the time; and that.

    It ends at `ends_at`: time in which no step was made counts. It ends with the newest step where that is
    later, and where the next one may be under way at `ends_at`, which is neither counted nor charged.
    """
    is_standing = newest_at < ends_at - step_s
    window_s = (ends_at if is_standing else newest_at) - began_at
    if window_s <= 0.0:
        return None, None
    return min(1.0, max(0, steps) * step_s / window_s), window_s


def undisturbed_s(before_s: float | None, after_s: float | None) -> float | None:
    """The faster pace. Of a slow start alone, whatever follows would look as good as undisturbed."""
    return min((pace for pace in (before_s, after_s) if pace), default=None)
