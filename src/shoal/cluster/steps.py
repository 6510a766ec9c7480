"""The ordered steps that make machines a cluster. Pure: facts and an inventory in, steps out.

Each step has a check, which changes nothing, and an `apply`. A step whose check succeeds is left alone, so
running everything again changes nothing. Steps of one stage run on all machines at once, those of one machine
in order. A stage begins when the one before it has ended everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from shoal.cluster import apt, node_archive, prerequisites, render, shell
from shoal.cluster.facts import DATABASE, Facts
from shoal.cluster.inventory import HostRole, Inventory, InventoryHost
from shoal.cluster.render import ClusterSecrets, File

INSTALL_S = 1200.0
STEP_S = 120.0
ANSWER_S = 60


class StepStage(IntEnum):
    """The order of the stages. The last three are for machines that leave."""

    PREPARE = 1
    FILES = 2
    DATABASE = 3
    CONTROL = 4
    WORK = 5
    VERIFY = 6
    STOP_WORK = 7
    STOP_CONTROL = 8
    CLEAN = 9


@dataclass(frozen=True)
class Step:
    """One change. `host` is the address of the machine it is about; it runs there unless `on` says where."""

    host: str
    label: str
    stage: StepStage
    title: str
    check: str
    apply: str
    file: File | None = None
    stdin: bytes = b""
    timeout_s: float = STEP_S
    on: str = ""
    needs_decision: bool = False
    """If its check fails, a person must decide: it is reported once, at the end, and not while others run."""

    @property
    def runs_on(self) -> str:
        return self.on or self.host


def packages_of(host: InventoryHost) -> tuple[str, ...]:
    packages = ["munge", "slurm-client"]
    if host.has(HostRole.CONTROLLER):
        packages.append("slurmctld")
    if host.has(HostRole.DATABASE):
        packages += ["slurmdbd", "mariadb-server"]
    if host.has(HostRole.WORKER):
        packages += ["slurmd", "python3"]
    return tuple(packages)


def plan(
    inventory: Inventory, facts: Mapping[str, Facts], secrets: ClusterSecrets, parts: Mapping[str, bytes]
) -> list[Step]:
    """Return every step for the machines that answered (`facts`), stage by stage.

    Machines of the inventory that did not answer stay declared with their last detected hardware. `parts` is
    the node archive for each worker, by address.
    """
    steps: list[Step] = []
    for host in inventory.hosts:
        if (fact := facts.get(host.address)) is not None:
            steps += _machine_steps(host, fact, inventory, facts, secrets)
            if host.hardware and host.has(HostRole.WORKER):
                steps.append(_node_part(host, fact, parts.get(host.address, b"")))
            if host.hardware and inventory.shared:
                steps.append(_shared(host, fact, inventory))
    controller = inventory.controller
    for host in inventory.hosts:
        if host.has(HostRole.WORKER) and host.hardware and host.address in facts:
            steps.append(
                Step(
                    host=host.address,
                    label=host.label,
                    stage=StepStage.VERIFY,
                    title=f"node {host.label} answers the controller",
                    check=shell.is_node_ready(host.label),
                    apply=shell.await_node_ready(host.label, ANSWER_S),
                    timeout_s=ANSWER_S * 3,
                    on=controller.address,
                )
            )
    return sorted(steps, key=lambda step: step.stage)


def _machine_steps(
    host: InventoryHost,
    fact: Facts,
    inventory: Inventory,
    facts: Mapping[str, Facts],
    secrets: ClusterSecrets,
) -> list[Step]:
    make = StepBuilder(host, fact)
    key = render.munge_key(secrets)
    make.add(
        StepStage.PREPARE,
        f"belongs to cluster {inventory.cluster} (daemons started by {_starter(fact)})",
        shell.is_claimed(inventory.claim),
        shell.make_claim(inventory.claim, fact.init),
    )
    packages = packages_of(host)
    make.add(
        StepStage.PREPARE,
        f"packages {' '.join(packages)}",
        apt.are_installed(packages),
        apt.install(packages),
        INSTALL_S,
    )
    make.add_file(StepStage.PREPARE, key)
    make.add_daemon(StepStage.PREPARE, shell.MUNGE, [key])
    if host.hardware is None:
        return make.steps
    names = render.hosts_file_lines(inventory)
    make.add(StepStage.FILES, "names in /etc/hosts", shell.has_names(names), shell.write_names(names))
    make.add_folder(StepStage.FILES, "/var/log/slurm", "slurm:slurm", "0755")
    files = [
        render.slurm_conf(inventory, facts),
        render.gres_conf(inventory),
        render.topology_conf(inventory),
        render.cgroup_conf(fact),
    ]
    for file in files:
        make.add_file(StepStage.FILES, file)
    if host.has(HostRole.DATABASE):
        _database_steps(make, inventory, secrets)
    if host.has(HostRole.CONTROLLER):
        make.add_folder(StepStage.CONTROL, "/var/spool/slurmctld", "slurm:slurm", "0700")
        make.add(
            StepStage.CONTROL,
            f"cluster {inventory.cluster} in accounting",
            shell.is_registered(inventory.cluster),
            shell.register(inventory.cluster),
        )
        make.add_daemon(StepStage.CONTROL, shell.SLURMCTLD, files)
    if host.has(HostRole.WORKER):
        make.add_folder(StepStage.FILES, "/var/spool/slurmd", "root:root", "0755")
        make.add_file(StepStage.FILES, render.health_check(host, host.hardware))
        make.add_daemon(StepStage.WORK, shell.SLURMD, files)
    return make.steps


def _node_part(host: InventoryHost, fact: Facts, part: bytes) -> Step:
    """Unpack the node archive: a folder that this machine's own Python runs."""
    make = StepBuilder(host, fact)
    archive = File("an archive on standard input", part, is_binary=True)
    check, apply = (
        node_archive.is_archive_unpacked(archive.sha256),
        node_archive.unpack_archive(archive.sha256),
    )
    make.add(StepStage.FILES, f"Shoal's node archive in {node_archive.NODE_DIR}", check, apply, file=archive)
    return make.steps[0]


def shared_directory_checks(inventory: Inventory, facts: Mapping[str, Facts]) -> list[Step]:
    """Return checks that the directory exists, for machines that answered, before any change.

    Members are not checked: if the file system of one is away, everything else is still updated.
    """
    looks: list[Step] = []
    for host in inventory.hosts:
        if (fact := facts.get(host.address)) is None or inventory.shared is None:
            continue
        if host.has(HostRole.CONTROLLER) or not host.hardware:
            make = StepBuilder(host, fact)
            make.add(
                StepStage.PREPARE,
                f"{inventory.shared} is there",
                prerequisites.directory_exists(inventory.shared),
                "false",
            )
            looks += make.steps
    return looks


def _shared(host: InventoryHost, fact: Facts, inventory: Inventory) -> Step:
    """Have the controller write a mark in the directory, and every other machine check that it sees it."""
    make = StepBuilder(host, fact)
    assert inventory.shared is not None
    folder, mark = inventory.shared, f"{inventory.cluster} of {inventory.controller.label}"
    if host.has(HostRole.CONTROLLER):
        apply = prerequisites.write_shared_mark(folder, mark)
        make.add(
            StepStage.CONTROL, f"{folder} can be written", prerequisites.has_shared_mark(folder, mark), apply
        )
    else:
        apply = prerequisites.explain_missing_mark(folder, mark, inventory.controller.label)
        make.add(
            StepStage.WORK,
            f"{folder} is the controller's",
            prerequisites.has_shared_mark(folder, mark),
            apply,
        )
    return make.steps[0]


def _database_steps(make: StepBuilder, inventory: Inventory, secrets: ClusterSecrets) -> None:
    conf = render.slurmdbd_conf(inventory, secrets)
    settings: list[File] = []
    # A MariaDB that was there before serves others: its settings stay, and it is started but not restarted.
    if "mariadb-server" not in make.fact.packages or "mariadb-server" in make.fact.own_packages:
        settings = [render.mariadb_cnf()]
        make.add_file(StepStage.DATABASE, settings[0])
        make.add_daemon(StepStage.DATABASE, shell.MARIADB, settings)
    else:
        make.add(
            StepStage.DATABASE,
            "mariadb runs (it was here before Shoal)",
            shell.is_running(shell.MARIADB, make.fact.init),
            shell.start(shell.MARIADB, make.fact.init, "kept"),
        )
    sql = render.database_sql(secrets)
    digest = render.digest([File("sql", sql)])
    make.add(
        StepStage.DATABASE,
        f"database {DATABASE} and its user",
        shell.has_database(digest),
        shell.make_database(digest),
        file=File("SQL on standard input", sql, is_secret=True),
    )
    make.add_file(StepStage.DATABASE, conf)
    make.add_daemon(StepStage.DATABASE, shell.SLURMDBD, [conf])


def _starter(fact: Facts) -> str:
    return "systemd" if fact.init == "systemd" else "Shoal itself: no systemd here"


class StepBuilder:
    """Collects the steps of one machine."""

    def __init__(self, host: InventoryHost, fact: Facts) -> None:
        self.host = host
        self.fact = fact
        self.steps: list[Step] = []

    def add(
        self,
        stage: StepStage,
        title: str,
        check: str,
        apply: str,
        timeout_s: float = STEP_S,
        file: File | None = None,
    ) -> None:
        self.steps.append(
            Step(
                host=self.host.address,
                label=self.host.label,
                stage=stage,
                title=title,
                check=check,
                apply=apply,
                file=file,
                stdin=file.content if file else b"",
                timeout_s=timeout_s,
            )
        )

    def add_file(self, stage: StepStage, file: File) -> None:
        if self.fact.files.get(file.path) == file.sha256 and not self.fact.is_own(file.path):
            # It was there before, with the same content: a key that is kept. It does not become Shoal's.
            title = f"owner and mode of {file.path}, which is kept"
            self.add(stage, title, shell.is_written(file), shell.set_owner_and_mode(file))
            return
        is_foreign = file.path in self.fact.files and not self.fact.is_own(file.path)
        check, apply = shell.is_written(file), shell.write(file, is_foreign=is_foreign)
        self.add(stage, f"file {file.path}", check, apply, file=file)

    def add_folder(self, stage: StepStage, path: str, owner: str, mode: str) -> None:
        check, apply = shell.has_folder(path, owner, mode), shell.make_folder(path, owner, mode)
        self.add(stage, f"folder {path}", check, apply)

    def add_daemon(self, stage: StepStage, service: shell.Daemon, files: Sequence[File]) -> None:
        digest = render.digest(files)
        init = self.fact.init
        check, apply = shell.is_started(service, init, digest), shell.start(service, init, digest)
        self.add(stage, f"{service.process} runs with these files", check, apply)
