"""The ordered steps that make machines a cluster. Pure: facts and an inventory in, steps out.

Each step has a look (`check`, which changes nothing) and a change (`apply`): a step whose look says yes is
left alone, so running everything again changes nothing. Steps of one stage run on all machines at once,
those of one machine in order; a stage begins when the one before it has ended everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from shoal.cluster import apt, node_part, render, shared, shell
from shoal.cluster.facts import DATABASE, Facts
from shoal.cluster.inventory import Host, Inventory, Role
from shoal.cluster.render import File, Secrets

INSTALL_S = 1200.0
STEP_S = 120.0
ANSWER_S = 60


class Stage(IntEnum):
    """The order of things. The last three are for machines that leave."""

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
    """`host` is the address of the machine the step is about; it runs there unless `on` says where."""

    host: str
    label: str
    stage: Stage
    title: str
    check: str
    apply: str
    file: File | None = None
    stdin: bytes = b""
    timeout_s: float = STEP_S
    on: str = ""
    is_asking: bool = False
    """A no to it is for somebody to decide: said once, in the end, and not while others go on."""

    @property
    def where(self) -> str:
        return self.on or self.host


def packages_of(host: Host) -> tuple[str, ...]:
    found = ["munge", "slurm-client"]
    if host.has(Role.CONTROLLER):
        found.append("slurmctld")
    if host.has(Role.DATABASE):
        found += ["slurmdbd", "mariadb-server"]
    if host.has(Role.WORKER):
        found += ["slurmd", "python3"]
    return tuple(found)


def plan(
    inventory: Inventory, facts: Mapping[str, Facts], secrets: Secrets, parts: Mapping[str, bytes]
) -> list[Step]:
    """Every step for the machines that answered (`facts`), stage by stage.

    Machines of the inventory that did not answer stay declared as they were found the last time. `parts` is
    Shoal's own archive for each worker, by address.
    """
    steps: list[Step] = []
    for host in inventory.hosts:
        if (fact := facts.get(host.address)) is not None:
            steps += _machine_steps(host, fact, inventory, facts, secrets)
            if host.found and host.has(Role.WORKER):
                steps.append(_node_part(host, fact, parts.get(host.address, b"")))
            if host.found and inventory.shared:
                steps.append(_shared(host, fact, inventory))
    controller = inventory.controller
    for host in inventory.hosts:
        if host.has(Role.WORKER) and host.found and host.address in facts:
            steps.append(
                Step(
                    host=host.address,
                    label=host.label,
                    stage=Stage.VERIFY,
                    title=f"node {host.label} answers the controller",
                    check=shell.answers(host.label),
                    apply=shell.await_answer(host.label, ANSWER_S),
                    timeout_s=ANSWER_S * 3,
                    on=controller.address,
                )
            )
    return sorted(steps, key=lambda step: step.stage)


def _machine_steps(
    host: Host, fact: Facts, inventory: Inventory, facts: Mapping[str, Facts], secrets: Secrets
) -> list[Step]:
    make = Maker(host, fact)
    key = render.munge_key(secrets)
    make.step(
        Stage.PREPARE,
        f"belongs to cluster {inventory.cluster} (daemons started by {_starter(fact)})",
        shell.is_claimed(inventory.claim),
        shell.make_claim(inventory.claim, fact.init),
    )
    packages = packages_of(host)
    make.step(
        Stage.PREPARE,
        f"packages {' '.join(packages)}",
        apt.are_installed(packages),
        apt.install(packages),
        INSTALL_S,
    )
    make.write(Stage.PREPARE, key)
    make.start(Stage.PREPARE, shell.MUNGE, [key])
    if host.found is None:
        return make.steps
    names = render.names(inventory)
    make.step(Stage.FILES, "names in /etc/hosts", shell.has_names(names), shell.write_names(names))
    make.folder(Stage.FILES, "/var/log/slurm", "slurm:slurm", "0755")
    files = [
        render.slurm_conf(inventory, facts),
        render.gres_conf(inventory),
        render.topology_conf(inventory),
        render.cgroup_conf(fact),
    ]
    for file in files:
        make.write(Stage.FILES, file)
    if host.has(Role.DATABASE):
        _database_steps(make, inventory, secrets)
    if host.has(Role.CONTROLLER):
        make.folder(Stage.CONTROL, "/var/spool/slurmctld", "slurm:slurm", "0700")
        make.step(
            Stage.CONTROL,
            f"cluster {inventory.cluster} in accounting",
            shell.is_registered(inventory.cluster),
            shell.register(inventory.cluster),
        )
        make.start(Stage.CONTROL, shell.SLURMCTLD, files)
    if host.has(Role.WORKER):
        make.folder(Stage.FILES, "/var/spool/slurmd", "root:root", "0755")
        make.write(Stage.FILES, render.health_check(host, host.found))
        make.start(Stage.WORK, shell.SLURMD, files)
    return make.steps


def _node_part(host: Host, fact: Facts, part: bytes) -> Step:
    """What starts Shoal's jobs on a node: a folder that this machine's own Python runs."""
    make = Maker(host, fact)
    archive = File("an archive on standard input", part, is_binary=True)
    check, apply = node_part.has_part(archive.sha256), node_part.unpack_part(archive.sha256)
    make.step(Stage.FILES, f"Shoal's part for jobs in {node_part.NODE_DIR}", check, apply, file=archive)
    return make.steps[0]


def shared_looks(inventory: Inventory, facts: Mapping[str, Facts]) -> list[Step]:
    """Whether the directory is there at all: to be looked at, on machines that answered, before any change.

    Members are not: of one whose file system is away the rest is brought up to date.
    """
    looks: list[Step] = []
    for host in inventory.hosts:
        if (fact := facts.get(host.address)) is None or inventory.shared is None:
            continue
        if host.has(Role.CONTROLLER) or not host.found:
            make = Maker(host, fact)
            make.step(
                Stage.PREPARE, f"{inventory.shared} is there", shared.is_there(inventory.shared), "false"
            )
            looks += make.steps
    return looks


def _shared(host: Host, fact: Facts, inventory: Inventory) -> Step:
    """The controller leaves a mark in the directory, and every other machine must see it."""
    make = Maker(host, fact)
    assert inventory.shared is not None
    folder, mark = inventory.shared, f"{inventory.cluster} of {inventory.controller.label}"
    if host.has(Role.CONTROLLER):
        apply = shared.leave_mark(folder, mark)
        make.step(Stage.CONTROL, f"{folder} can be written", shared.has_mark(folder, mark), apply)
    else:
        apply = shared.miss_mark(folder, mark, inventory.controller.label)
        make.step(Stage.WORK, f"{folder} is the controller's", shared.has_mark(folder, mark), apply)
    return make.steps[0]


def _database_steps(make: Maker, inventory: Inventory, secrets: Secrets) -> None:
    conf = render.slurmdbd_conf(inventory, secrets)
    settings: list[File] = []
    # A MariaDB that was there before serves others: its settings stay, and it is started but not restarted.
    if "mariadb-server" not in make.fact.packages or "mariadb-server" in make.fact.own_packages:
        settings = [render.mariadb_cnf()]
        make.write(Stage.DATABASE, settings[0])
        make.start(Stage.DATABASE, shell.MARIADB, settings)
    else:
        make.step(
            Stage.DATABASE,
            "mariadb runs (it was here before Shoal)",
            shell.is_running(shell.MARIADB, make.fact.init),
            shell.start(shell.MARIADB, make.fact.init, "kept"),
        )
    sql = render.database_sql(secrets)
    digest = render.digest([File("sql", sql)])
    make.step(
        Stage.DATABASE,
        f"database {DATABASE} and its user",
        shell.has_database(digest),
        shell.make_database(digest),
        file=File("SQL on standard input", sql, is_secret=True),
    )
    make.write(Stage.DATABASE, conf)
    make.start(Stage.DATABASE, shell.SLURMDBD, [conf])


def _starter(fact: Facts) -> str:
    return "systemd" if fact.init == "systemd" else "Shoal itself: no systemd here"


class Maker:
    """Collects the steps of one machine."""

    def __init__(self, host: Host, fact: Facts) -> None:
        self.host = host
        self.fact = fact
        self.steps: list[Step] = []

    def step(
        self,
        stage: Stage,
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

    def write(self, stage: Stage, file: File) -> None:
        if self.fact.files.get(file.path) == file.sha256 and not self.fact.is_own(file.path):
            # It was there before, with this very content: a key that is kept. It does not become Shoal's.
            title = f"owner and mode of {file.path}, which is kept"
            self.step(stage, title, shell.is_written(file), shell.give(file))
            return
        is_foreign = file.path in self.fact.files and not self.fact.is_own(file.path)
        check, apply = shell.is_written(file), shell.write(file, is_foreign=is_foreign)
        self.step(stage, f"file {file.path}", check, apply, file=file)

    def folder(self, stage: Stage, path: str, owner: str, mode: str) -> None:
        check, apply = shell.has_folder(path, owner, mode), shell.make_folder(path, owner, mode)
        self.step(stage, f"folder {path}", check, apply)

    def start(self, stage: Stage, service: shell.Service, files: Sequence[File]) -> None:
        digest = render.digest(files)
        init = self.fact.init
        check, apply = shell.is_started(service, init, digest), shell.start(service, init, digest)
        self.step(stage, f"{service.process} runs with these files", check, apply)
