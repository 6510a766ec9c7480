"""The five things people do with a cluster: create, add, remove, upgrade, destroy.

Each gathers facts, asks `steps` or `leaving` what to do, carries it out and returns what became of it. Each
may be run again after any end, and goes on where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster import leaving
from shoal.cluster.advice import firewall
from shoal.cluster.facts import Facts
from shoal.cluster.inventory import Found, Host, Inventory, Role
from shoal.cluster.members import declared_as
from shoal.cluster.objections import Takeover, misfits, objections, remarks, whose
from shoal.cluster.render import declared, is_contained
from shoal.cluster.run import Crew, State, known_secrets, must_have
from shoal.cluster.steps import Stage, plan, shared_looks
from shoal.errors import EngineRefused, ShoalError, StateError


@dataclass(frozen=True)
class Wishes:
    """What was said beside the command."""

    takeover: Takeover = Takeover.REFUSE
    is_forced: bool = False
    has_packages_removed: bool = False
    as_found: frozenset[str] = frozenset()
    """Addresses of members that may have less than they joined with."""


@dataclass
class Report:
    """How it ended. `inventory` is what the cluster is now; None once it is gone."""

    inventory: Inventory | None
    advice: list[str] = field(default_factory=list)
    """What a firewall must let through."""
    has_new: bool = False
    """Whether a machine is in that was not before."""
    remarks: list[str] = field(default_factory=list)
    gone: frozenset[str] = frozenset()
    """Addresses of machines that are out: that one of them did not answer is no failure."""


async def create(crew: Crew, inventory: Inventory, wishes: Wishes) -> Report:
    """Make the machines a cluster, or see that they are one. A worker that fails is left out and reported.

    Raises `EngineRefused` if the controller or the database cannot be had: without them there is no cluster.
    """
    await crew.meet(inventory.members)
    for step in await crew.lacking(shared_looks(inventory, _present(crew))):
        crew.refuse(
            inventory.host(step.host),
            f"there is no directory {inventory.shared} on {step.label}",
            hint="make or mount it on every machine, or name another:"
            f" `shoal cluster create --name {inventory.cluster} --shared DIR`",
        )
    _object(crew, inventory, wishes)
    return await _bring_to(crew, inventory, wishes)


async def _bring_to(crew: Crew, inventory: Inventory, wishes: Wishes) -> Report:
    """The cluster as it shall be, of machines that nobody has objected to."""
    joined = {host.address: host.found for host in inventory.hosts}
    vital = _vital(inventory)
    if wishes.takeover is Takeover.KEEP:
        inventory = inventory.model_copy(update={"keeps_munge_key": True})
    wanted, crew.doubts = declared_as(inventory, _found(crew), wishes.as_found)
    secrets = await known_secrets(crew, wanted, wishes.takeover)
    first = [step for step in plan(wanted, _present(crew), secrets, {}) if step.stage is Stage.PREPARE]
    await crew.carry_out(first)
    await _look_again(crew, wanted)
    parts = await crew.parts(host for host in wanted.hosts if host.has(Role.WORKER))
    must_have(crew, vital)
    # Who failed before ever having joined is not declared; who is away for a while stays declared as it was.
    lost = {address: joined.get(address) for address in crew.failed}
    hosts = [
        host.model_copy(update={"found": lost[host.address]}) if host.address in lost else host
        for host in wanted.hosts
    ]
    wanted = wanted.with_hosts(hosts)
    present = _present(crew)
    rest = [step for step in plan(wanted, present, secrets, parts) if step.stage is not Stage.PREPARE]
    for stage in sorted({step.stage for step in rest}):
        await crew.carry_out([step for step in rest if step.stage is stage])
        if stage is not Stage.VERIFY:
            must_have(crew, vital)
    # Who came through all of it is whole again, whatever a `destroy` had begun there.
    wanted = wanted.with_hosts(
        host if host.address in crew.failed else host.model_copy(update={"is_going": False})
        for host in wanted.hosts
    )
    return Report(
        wanted,
        advice=firewall(wanted, crew.facts),
        has_new=any(host.found and not joined[host.address] for host in wanted.hosts),
        remarks=[
            *remarks(wanted, crew.facts, is_contained=is_contained(wanted, present)),
            *(_unclean(host, wanted) for host in wanted.hosts if host.is_unclean),
        ],
    )


def _unclean(host: Host, inventory: Inventory) -> str:
    again = f"`shoal cluster remove {host.label} --cluster {inventory.cluster}` again"
    return f"{host.label} is no node any more, and was not cleaned: {again}"


def _vital(inventory: Inventory) -> dict[str, str]:
    """Machines without which there is no cluster, and what each is for."""
    return {inventory.database.address: "database's machine", inventory.controller.address: "controller"}


def _object(crew: Crew, inventory: Inventory, wishes: Wishes) -> None:
    """Before anything is changed: refuse machines that do not fit. Raises where no cluster is left then."""
    for address, told in objections(inventory, crew.facts, wishes.takeover).items():
        crew.refuse(inventory.host(address), "; ".join(told))
    must_have(crew, _vital(inventory))


def _refuse_others(crew: Crew, hosts: Iterable[Host], inventory: Inventory, hint: str = "") -> None:
    """Before anything else is done to them: these machines must not be another cluster's."""
    for host in hosts:
        if (fact := crew.facts.get(host.address)) and fact.is_others(inventory):
            crew.refuse(host, whose(fact, inventory), hint)


def _found(crew: Crew) -> dict[str, Found]:
    return {address: fact.found for address, fact in crew.facts.items() if address not in crew.failed}


def _present(crew: Crew) -> dict[str, Facts]:
    return {address: fact for address, fact in crew.facts.items() if address not in crew.failed}


async def _look_again(crew: Crew, inventory: Inventory) -> None:
    """What the archives have brought, and whether it goes together. A dry run has brought nothing."""
    if crew.is_dry:
        return
    changed = {outcome.host for outcome in crew.outcomes if outcome.state is State.CHANGED}
    await crew.meet(host for host in inventory.hosts if host.address in changed - set(crew.failed))
    for address, told in misfits(inventory, _present(crew)).items():
        crew.refuse(inventory.host(address), "; ".join(told))


async def add(crew: Crew, inventory: Inventory, hosts: Iterable[Host], wishes: Wishes) -> Report:
    """Take more machines into a cluster. Those that fail are reported and stay out; of them, those that are
    not clean stay on the list.
    """
    new = tuple(hosts)
    # One that was not cleaned joins by the name that it has now: what it was called is for its removal alone.
    fresh = {"name": None, "is_unclean": False}
    joining = [host.model_copy(update=fresh) if host.is_unclean else host for host in new]
    report = await create(crew, inventory.with_hosts([*inventory.hosts, *joining]), wishes)
    assert report.inventory is not None
    joined = {host.address for host in report.inventory.hosts if host.found}
    known = {host.address for host in inventory.hosts}
    kept = [host for host in report.inventory.hosts if host.address in known | joined]
    left = [host for host in new if host.is_unclean and host.address not in joined]
    return replace(
        report,
        inventory=report.inventory.with_hosts([*kept, *left]),
        remarks=[*report.remarks, *(_unclean(host, inventory) for host in left)],
    )


async def remove(crew: Crew, inventory: Inventory, going: Sequence[Host], wishes: Wishes) -> Report:
    """Take machines out: no job there, out of every `slurm.conf`, then cleaned. A dead one may go, too.

    One that does not answer us may have jobs: Slurm is asked. One that does not let us in goes by force only.
    """
    _must_stay(inventory, going)
    await crew.meet(host for host in inventory.hosts if host in going or not host.is_unclean)
    _refuse_others(crew, [inventory.controller], inventory)
    must_have(crew, {inventory.controller.address: "controller"})
    away = (crew.silent | (crew.shut if wishes.is_forced else set())) & {host.address for host in going}
    for host in going:
        if host.address in crew.shut - away:
            wrong = crew.failed[host.address]
            raise EngineRefused(
                f"{crew.absence(host)}, and may have jobs: {wrong.detail}",
                hint=f"{wrong.hint}; to give it up:"
                f" `shoal cluster remove {host.label} --cluster {inventory.cluster} --force`",
            )
    must_have(crew, {host.address: "machine" for host in going if host.address not in away})
    _object(crew, _without(inventory, going), wishes)
    try:
        leavers = await _drain(crew, inventory, going, away, wishes)
        if not leavers:
            return Report(inventory)
        facts = {host.address: crew.facts.pop(host.address) for host in leavers if host.address in crew.facts}
        report = await _bring_to(crew, _without(inventory, leavers), wishes)
    except ShoalError:
        await crew.undo(leaving.woken_node(host, inventory) for host in going)
        raise
    report.gone = frozenset(away)
    for host in going:
        if host.address in facts:
            crew.facts[host.address] = facts[host.address]
            await _clean(crew, inventory, [host], wishes, report)
            if host.address in crew.failed and report.inventory is not None:
                # Out of every file, and not clean: it stays on the list, by the name that it had.
                name = host.label if host.found else host.name
                unclean = host.model_copy(update={"name": name, "found": None, "is_unclean": True})
                report.inventory = report.inventory.with_hosts([*report.inventory.hosts, unclean])
                report.remarks.append(_unclean(unclean, inventory))
        elif host.address in away:
            report.remarks.append(f"{crew.absence(host)}: {_given_up(host)}")
    return report


def _must_stay(inventory: Inventory, going: Iterable[Host]) -> None:
    """Raise if without these there is no cluster. Changes nothing, and asks nobody."""
    for host in going:
        if host.has(Role.CONTROLLER) or host.has(Role.DATABASE):
            raise StateError(
                f"{host.label} is the controller or keeps the accounting: without it there is no cluster",
                hint=f"shoal cluster destroy --cluster {inventory.cluster}",
            )
    if declared(inventory) and not declared(_without(inventory, going)):
        last = ", ".join(host.label for host, _ in declared(inventory))
        raise StateError(
            f"no machine for jobs would be left without {last}, and a Slurm without nodes does not run",
            hint=f"`shoal cluster add ADDRESS --cluster {inventory.cluster}` first, or"
            f" `shoal cluster destroy --cluster {inventory.cluster}`",
        )


def _without(inventory: Inventory, going: Iterable[Host]) -> Inventory:
    gone = {host.address for host in going}
    return inventory.with_hosts(host for host in inventory.hosts if host.address not in gone)


async def _drain(
    crew: Crew, inventory: Inventory, going: Iterable[Host], away: Collection[str], wishes: Wishes
) -> list[Host]:
    """Those of them that may leave now: no job runs there, and none will. The others take jobs as before."""
    leavers: list[Host] = []
    # Those that are away first: a no about one of them ends everything.
    for host in sorted(going, key=lambda host: host.address not in away):
        is_away = host.address in away
        step = leaving.quiet_node(host, inventory, is_forced=wishes.is_forced, is_away=is_away)
        await crew.carry_out([step])
        must_have(crew, {inventory.controller.address: "controller"})
        if is_away or host.address not in crew.failed:
            leavers.append(host)
        else:
            await crew.undo([leaving.woken_node(host, inventory)])
    return leavers


def _given_up(host: Host) -> str:
    """What stays on a machine that is removed and cannot be cleaned, as nobody answers there."""
    if host.is_unclean:
        return (
            "it was not cleaned when it left, and is out of the inventory; what Shoal put there stays there,"
            " perhaps with the cluster's munge key"
        )
    if host.found:
        return "it is out, and what Shoal put there stays there, with the cluster's munge key"
    return "it was no node of the cluster, and is out of the inventory"


async def _clean(
    crew: Crew, inventory: Inventory, hosts: Iterable[Host], wishes: Wishes, report: Report
) -> None:
    steps = []
    for host in hosts:
        if (fact := crew.facts.get(host.address)) is None:
            continue
        if fact.is_others(inventory):
            report.remarks.append(f"{host.label} is left alone: it {whose(fact, inventory)}")
            continue
        steps += leaving.leave(host, fact, has_packages_removed=wishes.has_packages_removed)
        left = leaving.left_behind(fact, has_packages_removed=wishes.has_packages_removed)
        report.remarks += [f"{host.label}: {line}" for line in left]
    await crew.carry_out(sorted(steps, key=lambda step: step.stage))


async def upgrade(crew: Crew, inventory: Inventory, wishes: Wishes) -> Report:
    """Newer packages in Slurm's order, then every daemon whose version changed is started again."""
    await crew.meet(inventory.members)
    _refuse_others(crew, {inventory.database, inventory.controller}, inventory)
    must_have(crew, _vital(inventory))
    mine = {address: fact for address, fact in _present(crew).items() if not fact.is_others(inventory)}
    for steps in leaving.upgrades(inventory, mine):
        await crew.carry_out(steps)
        must_have(crew, _vital(inventory))  # a slurmd must never be newer than its slurmctld
    _object(crew, inventory, wishes)
    return await _bring_to(crew, inventory, wishes)


async def destroy(crew: Crew, inventory: Inventory, wishes: Wishes) -> Report:
    """Take the cluster down. While a machine failed or did not answer, the inventory stays, to try again.

    Forced, those that did not answer are given up. Only the controller can say that no job runs.
    """
    await crew.meet(inventory.hosts)
    report = Report(None)
    if not wishes.is_forced:
        if inventory.controller.found:
            hint = (
                f"`shoal cluster destroy --cluster {inventory.cluster} --yes --force` leaves it alone, and"
                " takes the others down"
            )
            _refuse_others(crew, [inventory.controller], inventory, hint)
        must_have(crew, {inventory.controller.address: "controller"})
    fact = crew.facts.get(inventory.controller.address)
    if fact and fact.own_cluster and not fact.is_others(inventory):
        gone = [host for host in inventory.members if host.address in crew.silent | crew.shut]
        await crew.carry_out([leaving.quiet_cluster(inventory, is_forced=wishes.is_forced, away=gone)])
        must_have(crew, {inventory.controller.address: "controller"})
    await _clean(crew, inventory, inventory.hosts, wishes, report)
    away = crew.silent | crew.shut
    if crew.is_dry or set(crew.failed) - (away if wishes.is_forced else set()):
        report.inventory = inventory if crew.is_dry else _half_gone(inventory, crew.failed)
        again = f"`shoal cluster destroy --cluster {inventory.cluster} --yes`"
        then = f"{again} again when it can be, or with `--force` to give it up"
    else:
        report.gone = frozenset(away)
        then = "what Shoal put there stays there"
    left = [host for host in inventory.hosts if host.address in away]
    report.remarks += [f"{crew.absence(host)}: {then}" for host in left]
    return report


def _half_gone(inventory: Inventory, failed: Collection[str]) -> Inventory:
    """What is left of a cluster to destroy: who is clean is no member any more, by the name that it had."""
    hosts = []
    for host in inventory.going().hosts:
        if host.address in failed:
            hosts.append(host)
        elif not host.is_unclean:
            name = host.label if host.found else host.name
            hosts.append(host.model_copy(update={"name": name, "found": None, "is_going": False}))
    return inventory.with_hosts(hosts)
