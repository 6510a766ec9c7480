"""How much each project used lately: device-seconds that lose half their weight every `half_life_s`.

Usage follows from three facts per project: a value, when it was true, and what has been held since. So it is
exact at any time without looking at jobs. A snapshot that carries the first two facts and the holdings gives
the same standings bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp2, expm1, inf, log

import msgspec

from shoal.scheduler.facts.amounts import DeviceAmount
from shoal.scheduler.order.project_tree import ProjectTree

HALF_LIFE_S = 7 * 86_400.0
CPUS_PER_GPU = 64.0
"""How many CPUs count as much as one GPU: about the ratio of their rental prices. Without GPUs it changes
nothing."""

LOG_2 = log(2)

Standing = tuple[float, ...]
"""Sorts projects: the one that used less for its weight comes first."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a project itself, without the projects below it, had used at `at`: device-seconds, decayed until
    then.

    Includes what was held at that time, up to it.
    """

    project: str
    value: float
    at: float


class _Account:
    """`loaded_at`: the value already includes holdings that began before then, up to that time."""

    __slots__ = ("at", "loaded_at", "millicpus", "milligpus", "value")

    def __init__(self, at: float) -> None:
        self.value = 0.0
        self.at = at
        self.loaded_at = -inf
        # Whole numbers, so that releasing everything leaves exactly zero.
        self.milligpus = 0
        self.millicpus = 0


class FairShare:
    """The usage of all projects, and their standing against their siblings in the tree."""

    def __init__(self, tree: ProjectTree, half_life_s: float = HALF_LIFE_S) -> None:
        self._tree = tree
        self._half_life_s = half_life_s
        self._accounts: dict[str, _Account] = {}
        self._totals: dict[str, float] = {}
        self._totals_of: tuple[float, int] | None = None
        """The time and the version of the tree for which the totals are true."""

    def load_usages(self, usages: Iterable[Usage]) -> None:
        """Set what had been used before anything is held."""
        for usage in usages:
            account = self._accounts[usage.project] = _Account(usage.at)
            account.value = usage.value
            account.loaded_at = usage.at
        self._totals_of = None

    def usages(self) -> tuple[Usage, ...]:
        """Return the facts by project. Together with the holdings, they determine all standings."""
        return tuple(
            Usage(project=project, value=account.value, at=account.at)
            for project, account in sorted(self._accounts.items())
        )

    def correct(self, usages: Iterable[Usage]) -> None:
        """Replace usage by what was recorded of all projects that had any. What is held stays held.

        After a restart a project may have no account that has one here. Even an empty account would make a
        difference: a start before its date, under a clock that was set back, is charged up to that date at
        once.
        """
        for account in self._accounts.values():
            account.value, account.at = 0.0, -inf
        for usage in usages:
            account = self._account(usage.project, usage.at)
            account.value, account.at = usage.value, usage.at
        self._totals_of = None

    def hold(self, project: str, held: DeviceAmount, since: float, *, is_new: bool = False) -> None:
        """The project holds more, since a time that may have passed.

        A loaded usage already counts what was held before its date, unless the holding `is_new`, whatever the
        clock says.
        """
        self._move(project, held, since, 1, is_new=is_new)

    def release(self, project: str, held: DeviceAmount, until: float, *, is_new: bool = False) -> None:
        """The project gave back part of what it held, at a time that may have passed."""
        self._move(project, held, until, -1, is_new=is_new)

    def charge(self, project: str, held: DeviceAmount, since: float, until: float) -> None:
        """The project held this for a while, and holds none of it now."""
        account = self._account(project, until)
        self._settle(account, until)
        spent = self._accrued(gpu_equivalents(held), until - since)
        account.value += spent * self._left(account.at - until)
        self._totals_of = None

    def used(self, project: str, now: float) -> float:
        """Return decayed device-seconds of the project itself, without the projects below it."""
        account = self._accounts.get(project)
        return 0.0 if account is None else self._value(account, now)

    def total(self, project: str, now: float) -> float:
        """Return decayed device-seconds of the project and all projects below it."""
        if self._totals_of != (now, self._tree.version):
            self._add_up(now)
        return self._totals.get(project, 0.0)

    def standing(self, project: str, now: float) -> Standing:
        """Return usage over weight at each level of the tree, from the top. Less is first.

        Jobs of a project that has other projects below it stand among those, with a weight of 1.
        """
        ancestry = self._tree.ancestry(project)
        levels = [self.total(view.name, now) / view.weight for view in reversed(ancestry)]
        if self._tree.has_children(project):
            levels.append(self.used(project, now))
        return tuple(levels)

    def _move(self, project: str, held: DeviceAmount, at: float, sign: int, *, is_new: bool) -> None:
        account = self._account(project, at)
        if self._totals_of is not None and at < self._totals_of[0]:
            self._totals_of = None
        if at >= account.at:
            self._settle(account, at)
        else:
            # The account is already settled later than `at`: add or subtract what this accrued until then.
            self._totals_of = None
            missed_s = account.at - (at if is_new else max(at, account.loaded_at))
            account.value = max(account.value + sign * self._accrued(gpu_equivalents(held), missed_s), 0.0)
        account.milligpus += sign * held.milligpus
        account.millicpus += sign * held.millicpus

    def _account(self, project: str, at: float) -> _Account:
        account = self._accounts.get(project)
        if account is None:
            account = self._accounts[project] = _Account(at)
        return account

    def _settle(self, account: _Account, at: float) -> None:
        """Move the value to a later time, if the account has not reached that time."""
        if at > account.at:
            account.value = self._value(account, at)
            account.at = at

    def _value(self, account: _Account, now: float) -> float:
        elapsed_s = max(now - account.at, 0.0)
        rate = account.milligpus / 1000 + account.millicpus / (1000 * CPUS_PER_GPU)
        return account.value * self._left(elapsed_s) + self._accrued(rate, elapsed_s)

    def _left(self, seconds: float) -> float:
        """Return what is left of 1 after this time."""
        return exp2(-seconds / self._half_life_s)

    def _accrued(self, rate: float, seconds: float) -> float:
        """Return what holding `rate` devices for this time adds up to at the end of it."""
        return -rate * self._half_life_s / LOG_2 * expm1(-seconds / self._half_life_s * LOG_2)

    def _add_up(self, now: float) -> None:
        """Compute the totals once per plan. The cost grows with the number of projects, never with the number
        of jobs.
        """
        self._totals = {}
        for project, account in sorted(self._accounts.items()):
            value = self._value(account, now)
            for view in self._tree.ancestry(project):
                self._totals[view.name] = self._totals.get(view.name, 0.0) + value
        self._totals_of = now, self._tree.version


def gpu_equivalents(held: DeviceAmount) -> float:
    """Return GPUs, with CPUs counted as parts of one."""
    return held.milligpus / 1000 + held.millicpus / (1000 * CPUS_PER_GPU)
