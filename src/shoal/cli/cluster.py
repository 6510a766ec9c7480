"""`shoal cluster`: a Slurm cluster out of machines that SSH reaches. Prints: `shoal.cluster` decides."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.cluster_connect import connect_shoal, forget_nodes, goodbye, refuse_fight
from shoal.cli.cluster_inventory import alone, apart, made_before, reached, save_or_drop, saved, wanted
from shoal.cli.cluster_words import as_json, closing, counted, planned, state_of, told, unfinished
from shoal.cli.flags import JsonFlag
from shoal.cli.show import note, print_json, print_table
from shoal.errors import EngineRefused, EngineUnreachable, ShoalError, StateError
from shoal.home import home_from_env

if TYPE_CHECKING:
    from shoal.cluster.inventory import Inventory
    from shoal.cluster.operate import Report, Wishes
    from shoal.cluster.run import Crew

app = App(name="cluster", help="Make a Slurm cluster out of machines that SSH reaches, and keep it.")

Cluster = Annotated[str | None, Parameter(name="--cluster", help="Which one, if there are several.")]
DryRun = Annotated[
    bool, Parameter(name="--dry-run", negative="", help="Print every file and command; change nothing.")
]
NewKeys = Annotated[
    bool,
    Parameter(
        name="--accept-new-host-keys", negative="", help="Trust machines that known_hosts does not know yet."
    ),
]
KnownHosts = Annotated[
    Path | None, Parameter(name="--known-hosts", help="Instead of ~/.ssh/known_hosts.", show_default=False)
]
Existing = Annotated[
    Literal["refuse", "keep", "replace"],
    Parameter(
        name="--existing",
        help="A munge key or Slurm file that was there before: refuse the machine, keep the controller's"
        " key, or replace it (the old one stays beside it).",
    ),
]
Force = Annotated[bool, Parameter(name="--force", negative="", help="Even if jobs run there.")]
Packages = Annotated[
    bool, Parameter(name="--packages", negative="", help="Also remove the packages that were installed.")
]
User = Annotated[str | None, Parameter(name="--user", help="Who to log in as: root, or one who may sudo.")]
SshPort = Annotated[int | None, Parameter(name="--port", help="Of the SSH servers.")]
Jump = Annotated[str | None, Parameter(name="--jump", help="`[USER@]HOST[:PORT]` to go through.")]


@app.default
def clusters(*, json: JsonFlag = False) -> int:
    """List the clusters made from here."""
    from shoal.cluster.inventory import known_clusters, load, path_of

    home = home_from_env()
    found = [load(path_of(home, name)) for name in known_clusters(home)]
    if json:
        print_json([item.model_dump(mode="json") for item in found])
    elif not found:
        print("no cluster yet; make one with `shoal cluster create --hosts a,b,c`")
    else:
        rows = [(item.cluster, item.controller.label, str(len(item.hosts))) for item in found]
        print_table(("CLUSTER", "CONTROLLER", "MACHINES"), rows, elastic="CONTROLLER")
        for said in filter(None, map(unfinished, found)):
            note(said)
    return 0


@app.command
def show(*, cluster: Cluster = None, json: JsonFlag = False) -> int:
    """Show the machines of a cluster, as they were found."""
    inventory, path = saved(cluster)
    if json:
        print_json(inventory.model_dump(mode="json"))
        return 0
    rows = []
    for host in inventory.hosts:
        found = host.found
        gpus = ", ".join(f"{len(g.files)} {g.kind or 'gpu'}" for g in found.gpus) if found else ""
        shape = (str(found.cpus), f"{found.memory_mib} MiB", gpus or "-") if found else ("-", "-", "-")
        rows.append((host.label, host.address, state_of(host), *shape, host.switch, " ".join(host.roles)))
    heads = ("NAME", "ADDRESS", "STATE", "CPUS", "MEMORY", "GPUS", "SWITCH", "ROLES")
    print_table(heads, rows, elastic="ROLES", spare=("SWITCH",))
    if said := unfinished(inventory):
        note(said)
    note(f"-- {path}")
    return 0


@app.command
def create(
    *,
    hosts: Annotated[
        str | None, Parameter(name="--hosts", help="`[USER@]ADDRESS[:PORT]`, by commas.")
    ] = None,
    file: Annotated[Path | None, Parameter(name="--file", help="An inventory instead of `--hosts`.")] = None,
    name: Annotated[
        str | None, Parameter(name="--name", help="Of the cluster; `shoal` if not given.")
    ] = None,
    controller: Annotated[
        str | None, Parameter(name="--controller", help="Which of the hosts decides; else the first.")
    ] = None,
    controller_works: Annotated[
        bool, Parameter(name="--controller-works", help="Whether jobs run on the controller, too.")
    ] = True,
    user: User = None,
    port: SshPort = None,
    jump: Jump = None,
    identity: Annotated[str | None, Parameter(name="--identity", help="A private key's file.")] = None,
    existing: Existing = "refuse",
    accept_new_host_keys: NewKeys = False,
    known_hosts: KnownHosts = None,
    shared: Annotated[
        str | None, Parameter(name="--shared", help="A directory that all machines have, for checkpoints.")
    ] = None,
    as_found: Annotated[
        str,
        Parameter(name="--as-found", help="Members that lost GPUs or their name for good, by commas."),
    ] = "",
    connect: Annotated[bool, Parameter(name="--connect", help="Connect Shoal to it at the end.")] = True,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Make bare Debian or Ubuntu machines a working Slurm cluster.

    With munge, cgroups, GPUs, accounting, topology and a health check. Run again it
    changes nothing, or mends what is missing. Without `--hosts` it goes by the
    inventory that is kept of the cluster.
    """
    from shoal.cluster.operate import create as make

    with alone(is_dry=dry_run):
        inventory, path = wanted(hosts, file, name, controller, controller_works, user, port, jump)
        inventory = reached(inventory, identity, known_hosts, shared).identified()
        before = made_before(path)
        accepted = frozenset(inventory.host(ref.strip()).address for ref in as_found.split(",") if ref)
        if not dry_run:
            save_or_drop(inventory, path)

        async def work(crew: Crew, wishes: Wishes) -> Report:
            return await make(crew, inventory, replace(wishes, as_found=accepted))

        order = Order(existing=existing, accepts=accept_new_host_keys, dry=dry_run, json=json)
        return order.carry_out(inventory, path, work, connects=connect, before=before)


@app.command
def add(
    hosts: Annotated[str, Parameter(help="`[USER@]ADDRESS[:PORT]`, by commas.")],
    *,
    cluster: Cluster = None,
    user: User = None,
    port: SshPort = None,
    jump: Jump = None,
    switch: Annotated[str | None, Parameter(name="--switch", help="Where they hang, for topology.")] = None,
    existing: Existing = "refuse",
    accept_new_host_keys: NewKeys = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Take more machines into a cluster. Jobs that run are not disturbed."""
    from shoal.cluster.inventory import make, typed_hosts
    from shoal.cluster.operate import add as take_in

    with alone(is_dry=dry_run):
        inventory, path = saved(cluster)
        inventory = inventory.identified()
        first = inventory.controller
        new = typed_hosts(hosts, user=user or first.user, port=port or first.port, jump=jump or first.jump)
        if switch:
            new = tuple(host.model_copy(update={"switch": switch}) for host in new)
        inventory, new = apart(inventory, new)
        wider = {**inventory.model_dump(), "hosts": [host.model_dump() for host in (*inventory.hosts, *new)]}
        asked = make(wider, "shoal cluster add")
        if not dry_run:
            save_or_drop(asked, path)  # cut off from here on, what was begun is known

        async def work(crew: Crew, wishes: Wishes) -> Report:
            return await take_in(crew, inventory, new, wishes)

        order = Order(existing=existing, accepts=accept_new_host_keys, dry=dry_run, json=json)
        return order.carry_out(asked, path, work)


@app.command
def remove(
    hosts: Annotated[str, Parameter(help="Names or addresses, by commas.")],
    *,
    cluster: Cluster = None,
    force: Force = False,
    packages: Packages = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Take machines out of a cluster, and from them what Shoal put there."""
    from shoal.cluster.operate import remove as take_out

    with alone(is_dry=dry_run):
        inventory, path = saved(cluster)
        going = [inventory.host(ref.strip()) for ref in hosts.split(",")]

        async def work(crew: Crew, wishes: Wishes) -> Report:
            return await take_out(crew, inventory, going, wishes)

        order = Order(dry=dry_run, json=json, forced=force, packages=packages)
        code = order.carry_out(inventory, path, work)
        nodes = {host.label for host in going if host.found} if not dry_run else set()
        nodes -= {host.label for host in saved(inventory.cluster)[0].members}
    if nodes and (said := forget_nodes(inventory, sorted(nodes))) and not json:
        note(said)
    return code


@app.command
def upgrade(
    *,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Install newer packages in the order Slurm asks for, and restart what changed."""
    from shoal.cluster.operate import upgrade as renew

    with alone(is_dry=dry_run):
        inventory, path = saved(cluster)

        async def work(crew: Crew, wishes: Wishes) -> Report:
            return await renew(crew, inventory, wishes)

        return Order(dry=dry_run, json=json).carry_out(inventory, path, work)


@app.command
def destroy(
    *,
    cluster: Cluster = None,
    yes: Annotated[bool, Parameter(name="--yes", negative="", help="Yes, also the accounting.")] = False,
    force: Force = False,
    packages: Packages = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Take a cluster down, with its accounting; only what Shoal made goes."""
    from shoal.cluster.operate import destroy as take_down

    with alone(is_dry=dry_run):
        inventory, path = saved(cluster)
        if not yes and not dry_run:
            raise StateError(
                f"`{inventory.cluster}` has {len(inventory.hosts)} machines; its daemons, its files and"
                " the accounting of its jobs would be gone",
                hint=f"shoal cluster destroy --cluster {inventory.cluster} --yes",
            )
        if force and not dry_run:
            refuse_fight(inventory)

        async def work(crew: Crew, wishes: Wishes) -> Report:
            if not dry_run:
                save_or_drop(inventory.going(), path)  # cut off from here on, what was begun is known
            return await take_down(crew, inventory, wishes)

        order = Order(dry=dry_run, json=json, forced=force, packages=packages)
        code = order.carry_out(inventory, path, work, before=inventory)
    if not (code or dry_run or json) and (said := goodbye(inventory)):
        note(said)
    return code


class Order:
    """One command under way: connections, progress, and the words at the end."""

    def __init__(
        self,
        *,
        existing: str = "refuse",
        accepts: bool = False,
        dry: bool = False,
        json: bool = False,
        forced: bool = False,
        packages: bool = False,
    ) -> None:
        self.existing = existing
        self.accepts = accepts
        self.is_dry = dry
        self.is_json = json
        self.is_forced = forced
        self.has_packages_removed = packages

    def carry_out(
        self,
        inventory: Inventory,
        path: Path,
        work: Callable[[Crew, Wishes], Awaitable[Report]],
        *,
        connects: bool = False,
        before: Inventory | None = None,
    ) -> int:
        """Do it, print it, keep the inventory it left; the exit code.

        `before`: what is kept again where all was refused and nothing changed.
        """
        import anyio

        begun = time.monotonic()
        if not self.is_json:
            note(f"-- cluster {inventory.cluster}: {counted(len(inventory.hosts), 'machine')}")
        try:
            crew, report, refusal = anyio.run(self._work, inventory, work)
        except KeyboardInterrupt:
            if not self.is_dry:
                note("-- machines may finish what they began; the same command goes on where this one was")
            raise
        if report is not None and not self.is_dry:
            save_or_drop(report.inventory, path)
        after = report.inventory if report else inventory
        if self.is_json:
            print_json(as_json(inventory.cluster, crew, report, is_dry=self.is_dry))
        else:
            for line in closing(
                inventory.cluster, crew, report, time.monotonic() - begun, is_dry=self.is_dry
            ):
                print(line)
        if refusal is not None:
            if before is not None and not (self.is_dry or crew.num_changed):
                save_or_drop(before.model_copy(update={"id": inventory.id}), path)
            raise refusal
        if connects and after is not None and not self.is_dry and (said := connect_shoal(after, crew.facts)):
            note(said)
        gone = report.gone if report else frozenset()
        return EngineRefused.exit_code if set(crew.failed) - gone else 0

    async def _work(
        self, inventory: Inventory, work: Callable[[Crew, Wishes], Awaitable[Report]]
    ) -> tuple[Crew, Report | None, ShoalError | None]:
        try:
            from shoal.cluster.ssh import Access, Ssh
        except ImportError as missing:
            raise StateError(
                f"machines are reached with asyncssh, and it is not installed ({missing})",
                hint="pip install 'shoal[cluster]'",
            ) from None
        from shoal.cluster.objections import Takeover
        from shoal.cluster.operate import Wishes
        from shoal.cluster.run import Crew

        known = Path(inventory.known_hosts) if inventory.known_hosts else None
        ssh = Ssh(Access(inventory.identity, known, self.accepts))
        crew = Crew(ssh.connect, self._tell, time.time, is_dry=self.is_dry)
        wishes = Wishes(Takeover(self.existing), self.is_forced, self.has_packages_removed)
        try:
            return crew, await work(crew, wishes), None
        except (EngineRefused, EngineUnreachable) as refusal:
            return crew, None, refusal
        finally:
            await crew.close()
            await ssh.close()

    def _tell(self, outcome: Any) -> None:
        if self.is_json:
            return
        for line in planned(outcome) if self.is_dry else told(outcome):
            print(line, flush=True)
