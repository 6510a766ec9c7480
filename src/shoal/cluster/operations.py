"""The five operations on a cluster: create, add, remove, upgrade, destroy.

Each gathers facts, asks `steps` or `teardown` what to do, applies the steps and reports the result. Each may
be run again after any end, and continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster import teardown
from shoal.cluster.facts import Facts
from shoal.cluster.inventory import DetectedHardware, HostRole, Inventory, InventoryHost
from shoal.cluster.preflight import (
    Takeover,
    incompatibilities,
    other_owner_text,
    preflight_problems,
    reconcile_members,
    remarks,
)
from shoal.cluster.prerequisites import firewall_advice
from shoal.cluster.render import declared_nodes, is_contained
from shoal.cluster.session import ClusterSession, StepState, load_secrets, require_hosts
from shoal.cluster.steps import StepStage, plan, shared_directory_checks
from shoal.errors import EngineRefused, ShoalError, StateError


@dataclass(frozen=True)
class OperationOptions:
    """The options of the command."""

    takeover: Takeover = Takeover.REFUSE
    is_forced: bool = False
    has_packages_removed: bool = False
    as_found: frozenset[str] = frozenset()
    """Addresses of members that may have less than they joined with."""


@dataclass
class ClusterReport:
    """The result of an operation. `inventory` is the cluster's new one; None if the cluster is gone."""

    inventory: Inventory | None
    advice: list[str] = field(default_factory=list)
    """What a firewall must let through."""
    has_new: bool = False
    """Whether a machine joined that was not in before."""
    remarks: list[str] = field(default_factory=list)
    gone: frozenset[str] = frozenset()
    """Addresses of machines that left; it is no failure if one of them did not answer."""


async def create(session: ClusterSession, inventory: Inventory, options: OperationOptions) -> ClusterReport:
    """Make the machines a cluster, or check that they are one. A worker that fails is left out and reported.

    Raise `EngineRefused` if the controller or the database fails: without them there is no cluster.
    """
    await session.gather_facts(inventory.members)
    for step in await session.unmet_steps(shared_directory_checks(inventory, _present(session))):
        session.refuse(
            inventory.host(step.host),
            f"there is no directory {inventory.shared} on {step.label}",
            hint="make or mount it on every machine, or name another:"
            f" `shoal cluster create --name {inventory.cluster} --shared DIR`",
        )
    _refuse_unfit(session, inventory, options)
    return await _converge(session, inventory, options)


async def _converge(
    session: ClusterSession, inventory: Inventory, options: OperationOptions
) -> ClusterReport:
    """Bring the machines that passed the preflight checks to the state of the inventory."""
    joined = {host.address: host.hardware for host in inventory.hosts}
    vital = _required_hosts(inventory)
    if options.takeover is Takeover.KEEP:
        inventory = inventory.model_copy(update={"keeps_munge_key": True})
    wanted, session.warnings = reconcile_members(inventory, _hardware(session), options.as_found)
    secrets = await load_secrets(session, wanted, options.takeover)
    first = [step for step in plan(wanted, _present(session), secrets, {}) if step.stage is StepStage.PREPARE]
    await session.apply_steps(first)
    await _recheck(session, wanted)
    parts = await session.node_archives(host for host in wanted.hosts if host.has(HostRole.WORKER))
    require_hosts(session, vital)
    # A machine that failed before it ever joined is not declared; a member that is away stays declared.
    lost = {address: joined.get(address) for address in session.failed}
    hosts = [
        host.model_copy(update={"hardware": lost[host.address]}) if host.address in lost else host
        for host in wanted.hosts
    ]
    wanted = wanted.with_hosts(hosts)
    present = _present(session)
    rest = [step for step in plan(wanted, present, secrets, parts) if step.stage is not StepStage.PREPARE]
    for stage in sorted({step.stage for step in rest}):
        await session.apply_steps([step for step in rest if step.stage is stage])
        if stage is not StepStage.VERIFY:
            require_hosts(session, vital)
    # A machine on which every step succeeded is whole again, whatever a `destroy` had begun there.
    wanted = wanted.with_hosts(
        host if host.address in session.failed else host.model_copy(update={"is_going": False})
        for host in wanted.hosts
    )
    return ClusterReport(
        wanted,
        advice=firewall_advice(wanted, session.facts),
        has_new=any(host.hardware and not joined[host.address] for host in wanted.hosts),
        remarks=[
            *remarks(wanted, session.facts, is_contained=is_contained(wanted, present)),
            *(_unclean_text(host, wanted) for host in wanted.hosts if host.is_unclean),
        ],
    )


def _unclean_text(host: InventoryHost, inventory: Inventory) -> str:
    again = f"`shoal cluster remove {host.label} --cluster {inventory.cluster}` again"
    return f"{host.label} is no longer a node, but was not cleaned: {again}"


def _required_hosts(inventory: Inventory) -> dict[str, str]:
    """Return the machines without which there is no cluster, with the role of each."""
    return {inventory.database.address: "database's machine", inventory.controller.address: "controller"}


def _refuse_unfit(session: ClusterSession, inventory: Inventory, options: OperationOptions) -> None:
    """Refuse machines that do not fit, before anything is changed. Raise if no cluster is left then."""
    for address, problems in preflight_problems(inventory, session.facts, options.takeover).items():
        session.refuse(inventory.host(address), "; ".join(problems))
    require_hosts(session, _required_hosts(inventory))


def _refuse_others(
    session: ClusterSession, hosts: Iterable[InventoryHost], inventory: Inventory, hint: str = ""
) -> None:
    """Refuse machines that belong to another cluster, before anything else is done to them."""
    for host in hosts:
        if (fact := session.facts.get(host.address)) and fact.belongs_to_other(inventory):
            session.refuse(host, other_owner_text(fact, inventory), hint)


def _hardware(session: ClusterSession) -> dict[str, DetectedHardware]:
    return {
        address: fact.hardware for address, fact in session.facts.items() if address not in session.failed
    }


def _present(session: ClusterSession) -> dict[str, Facts]:
    return {address: fact for address, fact in session.facts.items() if address not in session.failed}


async def _recheck(session: ClusterSession, inventory: Inventory) -> None:
    """Check that the installed packages fit together. A dry run has installed none."""
    if session.is_dry:
        return
    changed = {outcome.host for outcome in session.outcomes if outcome.state is StepState.CHANGED}
    await session.gather_facts(
        host for host in inventory.hosts if host.address in changed - set(session.failed)
    )
    for address, problems in incompatibilities(inventory, _present(session)).items():
        session.refuse(inventory.host(address), "; ".join(problems))


async def add(
    session: ClusterSession, inventory: Inventory, hosts: Iterable[InventoryHost], options: OperationOptions
) -> ClusterReport:
    """Add machines to a cluster. Machines that fail are reported and stay out; of them, those that are not
    clean stay on the list.
    """
    new = tuple(hosts)
    # A machine that was not cleaned joins by its present name; the old one is only for its removal.
    fresh = {"name": None, "is_unclean": False}
    joining = [host.model_copy(update=fresh) if host.is_unclean else host for host in new]
    report = await create(session, inventory.with_hosts([*inventory.hosts, *joining]), options)
    assert report.inventory is not None
    joined = {host.address for host in report.inventory.hosts if host.hardware}
    addresses = {host.address for host in inventory.hosts}
    kept = [host for host in report.inventory.hosts if host.address in addresses | joined]
    left = [host for host in new if host.is_unclean and host.address not in joined]
    return replace(
        report,
        inventory=report.inventory.with_hosts([*kept, *left]),
        remarks=[*report.remarks, *(_unclean_text(host, inventory) for host in left)],
    )


async def remove(
    session: ClusterSession, inventory: Inventory, going: Sequence[InventoryHost], options: OperationOptions
) -> ClusterReport:
    """Remove machines: no job there, out of every `slurm.conf`, then cleaned. A dead one may go, too.

    Slurm is asked about a machine that does not answer us, because it may have jobs. A machine that refuses
    the login is removed only with `--force`.
    """
    _refuse_essential(inventory, going)
    await session.gather_facts(host for host in inventory.hosts if host in going or not host.is_unclean)
    _refuse_others(session, [inventory.controller], inventory)
    require_hosts(session, {inventory.controller.address: "controller"})
    away = (session.unreachable | (session.inaccessible if options.is_forced else set())) & {
        host.address for host in going
    }
    for host in going:
        if host.address in session.inaccessible - away:
            wrong = session.failed[host.address]
            raise EngineRefused(
                f"{session.absence_text(host)}, and may have jobs: {wrong.detail}",
                hint=f"{wrong.hint}; to remove it all the same:"
                f" `shoal cluster remove {host.label} --cluster {inventory.cluster} --force`",
            )
    require_hosts(session, {host.address: "machine" for host in going if host.address not in away})
    _refuse_unfit(session, _without(inventory, going), options)
    try:
        leavers = await _drain(session, inventory, going, away, options)
        if not leavers:
            return ClusterReport(inventory)
        facts = {
            host.address: session.facts.pop(host.address) for host in leavers if host.address in session.facts
        }
        report = await _converge(session, _without(inventory, leavers), options)
    except ShoalError:
        await session.undo(teardown.undrain_step(host, inventory) for host in going)
        raise
    report.gone = frozenset(away)
    for host in going:
        if host.address in facts:
            session.facts[host.address] = facts[host.address]
            await _clean(session, inventory, [host], options, report)
            if host.address in session.failed and report.inventory is not None:
                # Out of every file, but not clean: it stays on the list, by its old name.
                name = host.label if host.hardware else host.name
                unclean = host.model_copy(update={"name": name, "hardware": None, "is_unclean": True})
                report.inventory = report.inventory.with_hosts([*report.inventory.hosts, unclean])
                report.remarks.append(_unclean_text(unclean, inventory))
        elif host.address in away:
            report.remarks.append(f"{session.absence_text(host)}: {_abandoned_text(host)}")
    return report


def _refuse_essential(inventory: Inventory, going: Iterable[InventoryHost]) -> None:
    """Raise if there is no cluster without these machines. Changes nothing and connects to none."""
    for host in going:
        if host.has(HostRole.CONTROLLER) or host.has(HostRole.DATABASE):
            raise StateError(
                f"{host.label} is the controller or keeps the accounting: without it there is no cluster",
                hint=f"shoal cluster destroy --cluster {inventory.cluster}",
            )
    if declared_nodes(inventory) and not declared_nodes(_without(inventory, going)):
        last = ", ".join(host.label for host, _ in declared_nodes(inventory))
        raise StateError(
            f"no machine for jobs would be left without {last}, and a Slurm without nodes does not run",
            hint=f"`shoal cluster add ADDRESS --cluster {inventory.cluster}` first, or"
            f" `shoal cluster destroy --cluster {inventory.cluster}`",
        )


def _without(inventory: Inventory, going: Iterable[InventoryHost]) -> Inventory:
    gone = {host.address for host in going}
    return inventory.with_hosts(host for host in inventory.hosts if host.address not in gone)


async def _drain(
    session: ClusterSession,
    inventory: Inventory,
    going: Iterable[InventoryHost],
    away: Collection[str],
    options: OperationOptions,
) -> list[InventoryHost]:
    """Return those that may leave now: no job runs there, and none will. The others take jobs as before."""
    leavers: list[InventoryHost] = []
    # First those that are away: a refusal of one of them ends the operation.
    for host in sorted(going, key=lambda host: host.address not in away):
        is_away = host.address in away
        step = teardown.drain_step(host, inventory, is_forced=options.is_forced, is_away=is_away)
        await session.apply_steps([step])
        require_hosts(session, {inventory.controller.address: "controller"})
        if is_away or host.address not in session.failed:
            leavers.append(host)
        else:
            await session.undo([teardown.undrain_step(host, inventory)])
    return leavers


def _abandoned_text(host: InventoryHost) -> str:
    """Say what stays on a removed machine that cannot be cleaned because it does not answer."""
    if host.is_unclean:
        return (
            "it was not cleaned when it left, and is out of the inventory; Shoal's files stay there,"
            " perhaps with the cluster's munge key"
        )
    if host.hardware:
        return "it is out, and Shoal's files stay there, with the cluster's munge key"
    return "it was not a node of the cluster, and is out of the inventory"


async def _clean(
    session: ClusterSession,
    inventory: Inventory,
    hosts: Iterable[InventoryHost],
    options: OperationOptions,
    report: ClusterReport,
) -> None:
    steps = []
    for host in hosts:
        if (fact := session.facts.get(host.address)) is None:
            continue
        if fact.belongs_to_other(inventory):
            report.remarks.append(f"{host.label} is left alone: it {other_owner_text(fact, inventory)}")
            continue
        steps += teardown.teardown_steps(host, fact, has_packages_removed=options.has_packages_removed)
        left = teardown.remaining_files_text(fact, has_packages_removed=options.has_packages_removed)
        report.remarks += [f"{host.label}: {line}" for line in left]
    await session.apply_steps(sorted(steps, key=lambda step: step.stage))


async def upgrade(session: ClusterSession, inventory: Inventory, options: OperationOptions) -> ClusterReport:
    """Upgrade packages in Slurm's order, then restart every daemon whose version changed."""
    await session.gather_facts(inventory.members)
    _refuse_others(session, {inventory.database, inventory.controller}, inventory)
    require_hosts(session, _required_hosts(inventory))
    mine = {
        address: fact for address, fact in _present(session).items() if not fact.belongs_to_other(inventory)
    }
    for steps in teardown.upgrade_rounds(inventory, mine):
        await session.apply_steps(steps)
        require_hosts(session, _required_hosts(inventory))  # a slurmd must never be newer than its slurmctld
    _refuse_unfit(session, inventory, options)
    return await _converge(session, inventory, options)


async def destroy(session: ClusterSession, inventory: Inventory, options: OperationOptions) -> ClusterReport:
    """Take the cluster down. If a machine failed or did not answer, keep the inventory for another try.

    With `--force`, machines that did not answer are given up. Only the controller can say that no job runs.
    """
    await session.gather_facts(inventory.hosts)
    report = ClusterReport(None)
    if not options.is_forced:
        if inventory.controller.hardware:
            hint = (
                f"`shoal cluster destroy --cluster {inventory.cluster} --yes --force` leaves it alone, and"
                " takes the others down"
            )
            _refuse_others(session, [inventory.controller], inventory, hint)
        require_hosts(session, {inventory.controller.address: "controller"})
    fact = session.facts.get(inventory.controller.address)
    if fact and fact.own_cluster and not fact.belongs_to_other(inventory):
        gone = [
            host for host in inventory.members if host.address in session.unreachable | session.inaccessible
        ]
        await session.apply_steps([teardown.quiesce_step(inventory, is_forced=options.is_forced, away=gone)])
        require_hosts(session, {inventory.controller.address: "controller"})
    await _clean(session, inventory, inventory.hosts, options, report)
    away = session.unreachable | session.inaccessible
    if session.is_dry or set(session.failed) - (away if options.is_forced else set()):
        report.inventory = inventory if session.is_dry else _partly_destroyed(inventory, session.failed)
        again = f"`shoal cluster destroy --cluster {inventory.cluster} --yes`"
        then = f"{again} again when it can be, or with `--force` to give it up"
    else:
        report.gone = frozenset(away)
        then = "Shoal's files stay there"
    left = [host for host in inventory.hosts if host.address in away]
    report.remarks += [f"{session.absence_text(host)}: {then}" for host in left]
    return report


def _partly_destroyed(inventory: Inventory, failed: Collection[str]) -> Inventory:
    """Return what is left to destroy: a machine that is clean is no longer a member, by the name it had."""
    hosts = []
    for host in inventory.marked_for_destroy().hosts:
        if host.address in failed:
            hosts.append(host)
        elif not host.is_unclean:
            name = host.label if host.hardware else host.name
            hosts.append(host.model_copy(update={"name": name, "hardware": None, "is_going": False}))
    return inventory.with_hosts(hosts)
