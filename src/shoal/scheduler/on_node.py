"""Who has to stop on one node so that a need fits there: those who lose least together.

Exactly where few jobs run or all of them give back the same; else by what is lost for each device of use.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.scheduler.amounts import Need
from shoal.scheduler.vacancy import Vacancy

EXACT_UP_TO = 6
"""Jobs on one node, of which every set is tried that could lose less than the best so far."""


def cheapest_set(
    vacancy: Vacancy, losses: Mapping[str, float], need: Need, *, is_rough: bool = False
) -> list[str] | None:
    """`losses`: those who may be asked, and what each would lose. None: they are not enough.

    `is_rough`: all of them, where any are needed.
    """
    if vacancy.fits():
        return []
    if not vacancy.fits(losses):
        return None
    if is_rough or need.is_exclusive:
        return list(losses)
    few = _greedy(vacancy, losses)
    gives = {vacancy.alike(attempt_id) for attempt_id in losses}
    if len(losses) > EXACT_UP_TO or (len(gives) == 1 and None not in gives):
        return few
    return _exact(vacancy, losses, few)


def _greedy(vacancy: Vacancy, losses: Mapping[str, float]) -> list[str]:
    """By what is lost for each device that it has use for, then without whoever turns out not needed."""
    chosen: list[str] = []
    for one in sorted(losses, key=lambda one: (losses[one] / vacancy.use_of(one), one)):
        chosen.append(one)
        if vacancy.fits(chosen):
            break
    for one in sorted(chosen, key=lambda one: (-losses[one], one)):
        fewer = [other for other in chosen if other is not one]
        if vacancy.fits(fewer):
            chosen = fewer
    return chosen


def _exact(vacancy: Vacancy, losses: Mapping[str, float], best: list[str]) -> list[str]:
    """The cheapest of all sets; `best` where none is cheaper."""
    names = sorted(losses, key=lambda one: (losses[one], one))
    least = sum(losses[one] for one in best)
    sets: list[tuple[int, float, list[str]]] = [(0, 0.0, [])]
    while sets:
        place, loss, chosen = sets.pop()
        for index in range(place, len(names)):
            more = loss + losses[names[index]]
            if more >= least:
                break  # those that follow lose no less
            with_it = [*chosen, names[index]]
            if vacancy.fits(with_it):
                best, least = with_it, more
            else:
                sets.append((index + 1, more, with_it))
    return best
