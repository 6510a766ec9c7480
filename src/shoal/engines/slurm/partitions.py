"""Partitions as Slurm tells of them, whichever door told: who may use which, and where a job goes. Pure.

A node may be in several. A job goes to the first that holds all its nodes and takes it, in one order for all:
that of `--partition`, or else Slurm's default, those that Slurm serves first, the large ones.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches

import msgspec

from shoal.errors import EngineRefused, EngineUnreachable, SpecError
from shoal.wire import Order

UNLIMITED = "UNLIMITED"
LABEL = "partition."
"""What the label of a node begins with that says that it is in one."""
TIME_MARGIN_S = 120.0
"""Slurm's limit comes after ours: the supervisor stops the job, with its grace, and says why."""


class Partition(msgspec.Struct, frozen=True, kw_only=True):
    """What a door does not show is as if it were not so."""

    name: str
    state: str = "UP"
    is_default: bool = False
    tier: int = 1
    """Slurm serves higher ones first, and may take nodes from lower ones for them."""
    min_nodes: int = 0
    max_nodes: int | None = None
    max_minutes: int | None = None
    has_default_time: bool = False
    """A job that names no time gets less than the most."""
    is_hidden: bool = False
    is_root_only: bool = False
    needs_reservation: bool = False
    groups: tuple[str, ...] = ()
    """Whose members alone may use it; empty: everybody. Accounts and QOS likewise."""
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    denied_qos: tuple[str, ...] = ()

    @property
    def is_up(self) -> bool:
        return self.state == "UP"


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What decides who may use what, as far as it is known. Empty: it is not."""

    is_root: bool = False
    groups: frozenset[str] = frozenset()
    account: str = ""
    qos: str = ""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The partitions that jobs may go to, by preference, and why not to the others."""

    usable: tuple[Partition, ...] = ()
    left_out: dict[str, str] = {}
    """By name, in words."""

    def of(self, names: Collection[str]) -> list[Partition]:
        """Those of these names that are usable, by preference."""
        return [one for one in self.usable if one.name in names]


ANY = Partition(name="")
NodesOf = Mapping[str, Collection[str]]
"""By node: the names of its partitions, usable or not."""


def divide(
    found: Iterable[Partition],
    nodes_of: NodesOf,
    named: tuple[str, ...],
    rights: Collection[Rights],
) -> Parts:
    """`named`: these alone, in that order. `rights`: of everybody whose jobs come; what one of them may use
    is usable. A partition that only nodes tell of is as any.
    """
    sizes = Counter(name for names in nodes_of.values() for name in names)
    known = {name: Partition(name=name) for name in sizes} | {one.name: one for one in found}
    usable, left_out = [], dict[str, str]()
    for one in known.values():
        if named and one.name not in named:
            left_out[one.name] = "not named by `--partition`"
            continue
        reasons = [why_not(one, own, is_named=one.name in named) for own in rights]
        if reasons and all(reasons):
            left_out[one.name] = reasons[0]
        else:
            usable.append(one)

    def preference(one: Partition) -> tuple[int, bool, int, int, str]:
        place = named.index(one.name) if named else 0
        return place, not one.is_default, -one.tier, -sizes[one.name], one.name

    return Parts(usable=tuple(sorted(usable, key=preference)), left_out=dict(sorted(left_out.items())))


def why_not(one: Partition, rights: Rights, *, is_named: bool = False) -> str:
    """Why no job with these rights may go there, in words; empty: one may, when the partition is up."""
    if one.is_hidden and not is_named:
        return f"hidden; `--partition {one.name}` uses it"
    if one.is_root_only and not rights.is_root:
        return "for root alone"
    if one.needs_reservation:
        return "for jobs with a reservation alone"
    if one.max_nodes == 0:
        return "takes no jobs (MaxNodes=0)"
    if one.groups and rights.groups and not rights.is_root and not rights.groups & set(one.groups):
        return f"for groups {', '.join(one.groups)} alone"
    for what, own, allowed, denied in (
        ("account", rights.account, one.accounts, one.denied_accounts),
        ("qos", rights.qos, one.qos, one.denied_qos),
    ):
        if own and allowed and own not in allowed:
            return f"not for {what} `{own}`, but for {', '.join(allowed)}"
        if own and not allowed and own in denied:
            return f"not for {what} `{own}`"
    return ""


def refuse_unknown(named: Iterable[str], known: Collection[str]) -> None:
    """`SpecError` where somebody names a partition that Slurm does not have."""
    for name in named:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"did you mean `{near[0]}`?" if near else "see them with `sinfo`"
            raise SpecError(
                f"Slurm has no partition `{name}`; there is {', '.join(sorted(known)) or 'none'}", hint=meant
            )


def time_for(order: Order, one: Partition) -> str:
    """What a job asks for there, in minutes; empty: as the site has it. One without a limit gets the longest,
    one with a limit a little more than that, and neither more than there is.
    """
    if order.time_limit_s is not None:
        asked = math.ceil((order.time_limit_s + order.grace_s + TIME_MARGIN_S) / 60)
        return str(asked if one.max_minutes is None else min(asked, one.max_minutes))
    if not one.has_default_time:
        return ""
    return UNLIMITED if one.max_minutes is None else str(one.max_minutes)


def limit_for(order: Order, one: Partition) -> float | None:
    """How long a job with a limit may run where Slurm's own would come too soon after it; None: as it says.

    Slurm counts from before there is a supervisor, and what Slurm ends is lost and begins anew: our limit
    has to come first, each time. A short partition is not all margin: half of it is the job's.
    """
    if order.time_limit_s is None or one.max_minutes is None:
        return None
    granted_s, early_s = one.max_minutes * 60.0, order.grace_s + TIME_MARGIN_S
    if order.time_limit_s + early_s <= granted_s:
        return None
    return granted_s - min(early_s, granted_s / 2)


def partition_for(parts: Parts, nodes_of: NodesOf, orders: tuple[Order, ...], rights: Rights) -> Partition:
    """Where a job on these nodes goes; one without a name: to Slurm's default, as nothing else is known.

    `EngineRefused`: nowhere, ever, in words. `EngineUnreachable`: nowhere now.
    """
    known = [set(nodes_of[order.node]) for order in orders if order.node in nodes_of]
    if not any(known):
        return ANY
    together = parts.of(set.intersection(*known))
    if not together:
        raise EngineRefused(_apart(parts, nodes_of, orders), hint="set `topology: pool` in the job")
    asked = _asked(orders[0])
    fits = {one.name: _misfit(one, orders, rights, asked) for one in together}
    fitting = [one for one in together if not fits[one.name]]
    if not fitting:
        told = "; ".join(f"`{name}` {why}" for name, why in fits.items())
        raise EngineRefused(
            f"no partition of Slurm's takes job {orders[0].job_number}: {told}",
            hint="see them with `sinfo`, and name one in the job: `require: {pool: NAME}`",
        )
    is_up = next((one for one in fitting if one.is_up), None)
    if is_up is None:
        told = "; ".join(f"partition `{one.name}` is {one.state}" for one in fitting)
        raise EngineUnreachable(f"Slurm takes no jobs there now: {told}", hint="`sinfo` shows them")
    return is_up


def is_asked(require: Iterable[str]) -> bool:
    """Whether labels that a job requires name a partition, so that all its nodes are in one."""
    return any(name == "pool" or name.startswith(LABEL) for name in require)


def _asked(order: Order) -> set[str]:
    """The partitions that the job has asked for by name: as a pool, or by a label."""
    named = {name.removeprefix(LABEL) for name in order.require if name.startswith(LABEL)}
    return named or {value for name, value in order.require.items() if name == "pool"}


def _misfit(one: Partition, orders: tuple[Order, ...], rights: Rights, asked: Collection[str]) -> str:
    first, count = orders[0], len(orders)
    if asked and one.name not in asked:
        return "is not the one that it asks for"
    if one.max_nodes is not None and count > one.max_nodes:
        return f"takes jobs of up to {one.max_nodes} nodes, and it has {count}"
    if count < one.min_nodes:
        return f"takes jobs from {one.min_nodes} nodes on, and it has {count}"
    if one.max_minutes is not None and (first.time_limit_s or 0) > one.max_minutes * 60:
        return f"takes jobs of up to {one.max_minutes} min, and its `time_limit` is longer"
    told = why_not(one, rights, is_named=True)
    return f"is {told}" if told else ""


def _apart(parts: Parts, nodes_of: NodesOf, orders: tuple[Order, ...]) -> str:
    told = (
        f"{order.node} in {', '.join(one.name for one in parts.of(nodes_of.get(order.node, ()))) or 'none'}"
        for order in orders
    )
    return (
        f"job {orders[0].job_number} has nodes that no one partition holds, and Slurm runs no job in two: "
        f"{'; '.join(told)}"
    )
