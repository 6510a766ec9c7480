"""Who had how much lately: device-seconds that lose half their weight every `half_life_s`.

Usage follows from three facts a project: a value, when it was true, and what is held since. So it is
exact at any moment without looking at jobs, and a snapshot that carries the first two and the holdings
gives the same standings bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, expm1, inf, log

import msgspec

from shoal.scheduler.devices import Amount
from shoal.scheduler.tree import Tree

HALF_LIFE_S = 7 * 86_400.0
CPUS_PER_GPU = 64.0
"""How many CPUs count as much as one GPU: about what they are rented for. Without GPUs it scales nothing."""

LOG_2 = log(2)

Standing = tuple[float, ...]
"""Sorts: who had less for their weight comes first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a project itself, without those below it, had used at `at`: device-seconds, decayed until then.

    It includes what was held at that time, up to it.
    """

    project: str
    value: float
    at: float


class _Account:
    """`told_at`: holdings since before then are in the value already, up to it."""

    __slots__ = ("at", "millicpus", "milligpus", "told_at", "value")

    def __init__(self, at: float) -> None:
        self.value = 0.0
        self.at = at
        self.told_at = -inf
        # Whole numbers, so that what is given back leaves exactly nothing behind.
        self.milligpus = 0
        self.millicpus = 0


class Fair:
    """Usage of all projects, and how they stand against their siblings in the tree."""

    def __init__(self, tree: Tree, half_life_s: float = HALF_LIFE_S) -> None:
        self._tree = tree
        self._half_life_s = half_life_s
        self._accounts: dict[str, _Account] = {}
        self._totals: dict[str, float] = {}
        self._totals_of: tuple[float, int] | None = None
        """When, and for which version of the tree, the totals are true."""

    def tell(self, usages: Iterable[Usage]) -> None:
        """What had been used, before anything is held."""
        for usage in usages:
            account = self._accounts[usage.project] = _Account(usage.at)
            account.value = usage.value
            account.told_at = usage.at
        self._totals_of = None

    def usages(self) -> tuple[Usage, ...]:
        """The facts, by project. With the holdings, they are all that standings follow from."""
        return tuple(
            Usage(project=project, value=account.value, at=account.at)
            for project, account in sorted(self._accounts.items())
        )

    def correct(self, usages: Iterable[Usage]) -> None:
        """Usage is what was recorded of all who had any, whatever was reckoned here; what is held stays held.

        After a restart there may be no account of a project that has one here. Even an empty one would show:
        a start before its date, under a clock that was set back, is charged up to it at once.
        """
        for account in self._accounts.values():
            account.value, account.at = 0.0, -inf
        for usage in usages:
            account = self._account(usage.project, usage.at)
            account.value, account.at = usage.value, usage.at
        self._totals_of = None

    def hold(self, project: str, held: Amount, since: float, *, is_new: bool = False) -> None:
        """It holds so much more, since a time that may have passed; what was told counts only once, and has
        nothing of what `is_new`, whatever the clock says.
        """
        self._move(project, held, since, 1, is_new=is_new)

    def release(self, project: str, held: Amount, until: float, *, is_new: bool = False) -> None:
        """It gave back so much of what it held, at a time that may have passed."""
        self._move(project, held, until, -1, is_new=is_new)

    def charge(self, project: str, held: Amount, since: float, until: float) -> None:
        """It held so much for a while, all of it over."""
        account = self._account(project, until)
        self._settle(account, until)
        spent = self._accrued(devices(held), until - since)
        account.value += spent * self._left(account.at - until)
        self._totals_of = None

    def used(self, project: str, now: float) -> float:
        """Decayed device-seconds of the project itself, without those below it."""
        account = self._accounts.get(project)
        return 0.0 if account is None else self._value(account, now)

    def total(self, project: str, now: float) -> float:
        """Decayed device-seconds of the project and all below it."""
        if self._totals_of != (now, self._tree.version):
            self._add_up(now)
        return self._totals.get(project, 0.0)

    def standing(self, project: str, now: float) -> Standing:
        """Usage over weight at each level of the tree, from the top. Less is first.

        Jobs of a project that has others below it stand among those, with a weight of 1.
        """
        line = self._tree.line(project)
        levels = [self.total(view.name, now) / view.weight for view in reversed(line)]
        if self._tree.has_children(project):
            levels.append(self.used(project, now))
        return tuple(levels)

    def _move(self, project: str, held: Amount, at: float, sign: int, *, is_new: bool) -> None:
        account = self._account(project, at)
        if self._totals_of is not None and at < self._totals_of[0]:
            self._totals_of = None
        if at >= account.at:
            self._settle(account, at)
        else:
            # Settled later than that already: add, or take back, what this had until then.
            self._totals_of = None
            missed_s = account.at - (at if is_new else max(at, account.told_at))
            account.value = max(account.value + sign * self._accrued(devices(held), missed_s), 0.0)
        account.milligpus += sign * held.milligpus
        account.millicpus += sign * held.millicpus

    def _account(self, project: str, at: float) -> _Account:
        account = self._accounts.get(project)
        if account is None:
            account = self._accounts[project] = _Account(at)
        return account

    def _settle(self, account: _Account, at: float) -> None:
        """Move the value to a later time, where that time has not been reached."""
        if at > account.at:
            account.value = self._value(account, at)
            account.at = at

    def _value(self, account: _Account, now: float) -> float:
        elapsed_s = max(now - account.at, 0.0)
        rate = account.milligpus / 1000 + account.millicpus / (1000 * CPUS_PER_GPU)
        return account.value * self._left(elapsed_s) + self._accrued(rate, elapsed_s)

    def _left(self, seconds: float) -> float:
        """What is left of 1 after so long."""
        return exp2(-seconds / self._half_life_s)

    def _accrued(self, rate: float, seconds: float) -> float:
        """What holding `rate` devices for so long comes to at the end of it."""
        return -rate * self._half_life_s / LOG_2 * expm1(-seconds / self._half_life_s * LOG_2)

    def _add_up(self, now: float) -> None:
        """Once a plan, in steps that grow with the number of projects: never with that of jobs."""
        self._totals = {}
        for project, account in sorted(self._accounts.items()):
            value = self._value(account, now)
            for view in self._tree.line(project):
                self._totals[view.name] = self._totals.get(view.name, 0.0) + value
        self._totals_of = now, self._tree.version


def devices(held: Amount) -> float:
    """GPUs, and CPUs as parts of one."""
    return held.milligpus / 1000 + held.millicpus / (1000 * CPUS_PER_GPU)
