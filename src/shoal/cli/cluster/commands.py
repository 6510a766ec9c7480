"""The subcommands of `shoal cluster`. They print; `shoal.cluster` decides."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from shoal.cli.cluster.connection import connect_shoal, disconnect_hint, forget_nodes, refuse_force_while_up
from shoal.cli.cluster.report import (
    as_json,
    closing_lines,
    counted,
    dry_run_lines,
    host_state,
    progress_lines,
    unfinished_text,
)
from shoal.cli.cluster.selection import (
    exclusive_change,
    existing_cluster,
    load_saved,
    requested_inventory,
    save_or_drop,
    split_joining,
    with_access,
)
from shoal.cli.flags import JsonFlag
from shoal.cli.output import note, print_json, print_table
from shoal.errors import EngineRefused, EngineUnreachable, ShoalError, StateError
from shoal.home import home_from_env

if TYPE_CHECKING:
    from shoal.cluster.inventory import Inventory
    from shoal.cluster.operations import ClusterReport, OperationOptions
    from shoal.cluster.session import ClusterSession

app = App(name="cluster", help="Create and maintain a Slurm cluster on machines reachable by SSH.")

Cluster = Annotated[str | None, Parameter(name="--cluster", help="The cluster, if there are several.")]
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
        help="What to do with a munge key or Slurm file that was there before: refuse the machine, keep the"
        " controller's key, or replace it (the old file stays beside it).",
    ),
]
Force = Annotated[bool, Parameter(name="--force", negative="", help="Even if jobs run there.")]
Packages = Annotated[
    bool, Parameter(name="--packages", negative="", help="Also remove the packages that were installed.")
]
User = Annotated[
    str | None, Parameter(name="--user", help="The user to log in as: root, or a user who may use sudo.")
]
SshPort = Annotated[int | None, Parameter(name="--port", help="The port of the SSH servers.")]
Jump = Annotated[str | None, Parameter(name="--jump", help="`[USER@]HOST[:PORT]` to go through.")]


@app.default
def clusters(*, json: JsonFlag = False) -> int:
    """List the clusters created from this home."""
    from shoal.cluster.inventory import inventory_path, list_clusters, load

    home = home_from_env()
    inventories = [load(inventory_path(home, name)) for name in list_clusters(home)]
    if json:
        print_json([item.model_dump(mode="json") for item in inventories])
    elif not inventories:
        print("no cluster yet; create one with `shoal cluster create --hosts a,b,c`")
    else:
        rows = [(item.cluster, item.controller.label, str(len(item.hosts))) for item in inventories]
        print_table(("CLUSTER", "CONTROLLER", "MACHINES"), rows, elastic="CONTROLLER")
        for text in filter(None, map(unfinished_text, inventories)):
            note(text)
    return 0


@app.command
def show(*, cluster: Cluster = None, json: JsonFlag = False) -> int:
    """Show the machines of a cluster with the hardware that was detected."""
    inventory, path = load_saved(cluster)
    if json:
        print_json(inventory.model_dump(mode="json"))
        return 0
    rows = []
    for host in inventory.hosts:
        hardware = host.hardware
        gpus = ", ".join(f"{len(g.files)} {g.kind or 'gpu'}" for g in hardware.gpus) if hardware else ""
        shape = (
            (str(hardware.cpus), f"{hardware.memory_mib} MiB", gpus or "-") if hardware else ("-", "-", "-")
        )
        rows.append((host.label, host.address, host_state(host), *shape, host.switch, " ".join(host.roles)))
    heads = ("NAME", "ADDRESS", "STATE", "CPUS", "MEMORY", "GPUS", "SWITCH", "ROLES")
    print_table(heads, rows, elastic="ROLES", spare=("SWITCH",))
    if text := unfinished_text(inventory):
        note(text)
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
        str | None, Parameter(name="--name", help="The cluster's name; by default `shoal`.")
    ] = None,
    controller: Annotated[
        str | None, Parameter(name="--controller", help="The host that runs slurmctld; by default the first.")
    ] = None,
    controller_works: Annotated[
        bool, Parameter(name="--controller-works", help="Run jobs on the controller, too.")
    ] = True,
    user: User = None,
    port: SshPort = None,
    jump: Jump = None,
    identity: Annotated[str | None, Parameter(name="--identity", help="The file of a private key.")] = None,
    existing: Existing = "refuse",
    accept_new_host_keys: NewKeys = False,
    known_hosts: KnownHosts = None,
    shared: Annotated[
        str | None, Parameter(name="--shared", help="A directory shared by all machines, for checkpoints.")
    ] = None,
    as_found: Annotated[
        str,
        Parameter(
            name="--as-found", help="Members to accept with fewer GPUs or a new name, comma-separated."
        ),
    ] = "",
    connect: Annotated[bool, Parameter(name="--connect", help="Connect Shoal to it at the end.")] = True,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Make bare Debian or Ubuntu machines a working Slurm cluster.

    It comes with munge, cgroups, GPUs, accounting, topology and a health check.
    Running it again changes nothing, or repairs what is missing. Without
    `--hosts` it uses the saved inventory of the cluster.
    """
    from shoal.cluster.operations import create as make

    with exclusive_change(is_dry=dry_run):
        inventory, path = requested_inventory(
            hosts, file, name, controller, controller_works, user, port, jump
        )
        inventory = with_access(inventory, identity, known_hosts, shared).with_id()
        before = existing_cluster(path)
        accepted = frozenset(inventory.host(ref.strip()).address for ref in as_found.split(",") if ref)
        if not dry_run:
            save_or_drop(inventory, path)

        async def work(session: ClusterSession, options: OperationOptions) -> ClusterReport:
            return await make(session, inventory, replace(options, as_found=accepted))

        order = ClusterOperation(existing=existing, accepts=accept_new_host_keys, dry=dry_run, json=json)
        return order.run(inventory, path, work, connects=connect, before=before)


@app.command
def add(
    hosts: Annotated[str, Parameter(help="`[USER@]ADDRESS[:PORT]`, by commas.")],
    *,
    cluster: Cluster = None,
    user: User = None,
    port: SshPort = None,
    jump: Jump = None,
    switch: Annotated[
        str | None, Parameter(name="--switch", help="The switch they are connected to, for topology.")
    ] = None,
    existing: Existing = "refuse",
    accept_new_host_keys: NewKeys = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Add machines to a cluster. Running jobs are not disturbed."""
    from shoal.cluster.inventory import build_inventory, parse_hosts
    from shoal.cluster.operations import add as take_in

    with exclusive_change(is_dry=dry_run):
        inventory, path = load_saved(cluster)
        inventory = inventory.with_id()
        first = inventory.controller
        new = parse_hosts(hosts, user=user or first.user, port=port or first.port, jump=jump or first.jump)
        if switch:
            new = tuple(host.model_copy(update={"switch": switch}) for host in new)
        inventory, new = split_joining(inventory, new)
        wider = {**inventory.model_dump(), "hosts": [host.model_dump() for host in (*inventory.hosts, *new)]}
        requested = build_inventory(wider, "shoal cluster add")
        if not dry_run:
            save_or_drop(requested, path)  # if this is interrupted, the inventory knows what was begun

        async def work(session: ClusterSession, options: OperationOptions) -> ClusterReport:
            return await take_in(session, inventory, new, options)

        order = ClusterOperation(existing=existing, accepts=accept_new_host_keys, dry=dry_run, json=json)
        return order.run(requested, path, work)


@app.command
def remove(
    hosts: Annotated[str, Parameter(help="Names or addresses, comma-separated.")],
    *,
    cluster: Cluster = None,
    force: Force = False,
    packages: Packages = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Remove machines from a cluster, and from them what Shoal installed."""
    from shoal.cluster.operations import remove as take_out

    with exclusive_change(is_dry=dry_run):
        inventory, path = load_saved(cluster)
        going = [inventory.host(ref.strip()) for ref in hosts.split(",")]

        async def work(session: ClusterSession, options: OperationOptions) -> ClusterReport:
            return await take_out(session, inventory, going, options)

        order = ClusterOperation(dry=dry_run, json=json, forced=force, packages=packages)
        code = order.run(inventory, path, work)
        nodes = {host.label for host in going if host.hardware} if not dry_run else set()
        nodes -= {host.label for host in load_saved(inventory.cluster)[0].members}
    if nodes and (text := forget_nodes(inventory, sorted(nodes))) and not json:
        note(text)
    return code


@app.command
def upgrade(
    *,
    cluster: Cluster = None,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Install newer packages in the order Slurm requires, and restart what changed."""
    from shoal.cluster.operations import upgrade as renew

    with exclusive_change(is_dry=dry_run):
        inventory, path = load_saved(cluster)

        async def work(session: ClusterSession, options: OperationOptions) -> ClusterReport:
            return await renew(session, inventory, options)

        return ClusterOperation(dry=dry_run, json=json).run(inventory, path, work)


@app.command
def destroy(
    *,
    cluster: Cluster = None,
    yes: Annotated[
        bool, Parameter(name="--yes", negative="", help="Confirm; the accounting goes, too.")
    ] = False,
    force: Force = False,
    packages: Packages = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> int:
    """Destroy a cluster and its accounting; only what Shoal made is removed."""
    from shoal.cluster.operations import destroy as take_down

    with exclusive_change(is_dry=dry_run):
        inventory, path = load_saved(cluster)
        if not yes and not dry_run:
            raise StateError(
                f"`{inventory.cluster}` has {len(inventory.hosts)} machines; this deletes its daemons, its"
                " files and the accounting of its jobs",
                hint=f"shoal cluster destroy --cluster {inventory.cluster} --yes",
            )
        if force and not dry_run:
            refuse_force_while_up(inventory)

        async def work(session: ClusterSession, options: OperationOptions) -> ClusterReport:
            if not dry_run:
                save_or_drop(
                    inventory.marked_for_destroy(), path
                )  # if this is interrupted, the inventory knows what was begun
            return await take_down(session, inventory, options)

        order = ClusterOperation(dry=dry_run, json=json, forced=force, packages=packages)
        code = order.run(inventory, path, work, before=inventory)
    if not (code or dry_run or json) and (hint := disconnect_hint(inventory)):
        note(hint)
    return code


class ClusterOperation:
    """One running command: its connections, its progress, and its last lines."""

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

    def run(
        self,
        inventory: Inventory,
        path: Path,
        work: Callable[[ClusterSession, OperationOptions], Awaitable[ClusterReport]],
        *,
        connects: bool = False,
        before: Inventory | None = None,
    ) -> int:
        """Run the operation, print it, save the inventory that it returns, and return the exit code.

        `before`: the inventory to restore if everything was refused and nothing changed.
        """
        import anyio

        begun = time.monotonic()
        if not self.is_json:
            note(f"-- cluster {inventory.cluster}: {counted(len(inventory.hosts), 'machine')}")
        try:
            session, report, refusal = anyio.run(self._execute, inventory, work)
        except KeyboardInterrupt:
            if not self.is_dry:
                note("-- machines may finish what they began; the same command continues from there")
            raise
        if report is not None and not self.is_dry:
            save_or_drop(report.inventory, path)
        after = report.inventory if report else inventory
        if self.is_json:
            print_json(as_json(inventory.cluster, session, report, is_dry=self.is_dry))
        else:
            for line in closing_lines(
                inventory.cluster, session, report, time.monotonic() - begun, is_dry=self.is_dry
            ):
                print(line)
        if refusal is not None:
            if before is not None and not (self.is_dry or session.num_changed):
                save_or_drop(before.model_copy(update={"id": inventory.id}), path)
            raise refusal
        if (
            connects
            and after is not None
            and not self.is_dry
            and (text := connect_shoal(after, session.facts))
        ):
            note(text)
        gone = report.gone if report else frozenset()
        return EngineRefused.exit_code if set(session.failed) - gone else 0

    async def _execute(
        self,
        inventory: Inventory,
        work: Callable[[ClusterSession, OperationOptions], Awaitable[ClusterReport]],
    ) -> tuple[ClusterSession, ClusterReport | None, ShoalError | None]:
        try:
            from shoal.cluster.ssh import Access, Ssh
        except ImportError as missing:
            raise StateError(
                f"machines are reached with asyncssh, which is not installed ({missing})",
                hint="pip install 'shoal[cluster]'",
            ) from None
        from shoal.cluster.operations import OperationOptions
        from shoal.cluster.preflight import Takeover
        from shoal.cluster.session import ClusterSession

        known_hosts = Path(inventory.known_hosts) if inventory.known_hosts else None
        ssh = Ssh(Access(inventory.identity, known_hosts, self.accepts))
        session = ClusterSession(ssh.connect, self._print_outcome, time.time, is_dry=self.is_dry)
        options = OperationOptions(Takeover(self.existing), self.is_forced, self.has_packages_removed)
        try:
            return session, await work(session, options), None
        except (EngineRefused, EngineUnreachable) as refusal:
            return session, None, refusal
        finally:
            await session.close()
            await ssh.close()

    def _print_outcome(self, outcome: Any) -> None:
        if self.is_json:
            return
        for line in dry_run_lines(outcome) if self.is_dry else progress_lines(outcome):
            print(line, flush=True)
