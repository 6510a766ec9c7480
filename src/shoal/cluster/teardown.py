"""The steps by which a machine leaves: what Shoal recorded as its own is removed, everything else stays.
Pure.

`upgrade_rounds` has the steps of an upgrade, which are those of `create` after newer packages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.cluster import apt, shell
from shoal.cluster.facts import DATABASE, DATABASE_USER, GOING_ON, MUNGE_KEY, STATE_DIR, WATCHED, Facts
from shoal.cluster.inventory import HostRole, Inventory, InventoryHost
from shoal.cluster.prerequisites import SHARED_MARK, remove_shared_mark
from shoal.cluster.steps import INSTALL_S, Step, StepBuilder, StepStage, packages_of

MARIADB_OWN = frozenset({DATABASE, "mysql", "sys", "performance_schema", "test"})
STOPPING = {
    "slurmd": StepStage.STOP_WORK,
    "slurmctld": StepStage.STOP_CONTROL,
    "slurmdbd": StepStage.STOP_CONTROL,
}
"""slurmd first, everywhere: without a controller, it could report the end of jobs to no process."""
LEAVES = "leaves"
"""The reason with which Slurm drains a node that leaves."""


def teardown_steps(host: InventoryHost, fact: Facts, *, has_packages_removed: bool) -> list[Step]:
    """Return every step for one machine; none for a machine on which Shoal recorded nothing."""
    make = StepBuilder(host, fact)
    if not fact.own_cluster:
        return []
    for service in shell.DAEMONS:
        if service.name in fact.own_started and not _serves_others(service, fact):
            make.add(
                STOPPING.get(service.name, StepStage.CLEAN),
                f"{service.process} does not run",
                f"{shell.is_being_stopped(service)} && ! {{ {shell.is_running(service, fact.init)}; }}",
                f"set -eu\n: >{shell.stamp_of(service)}\n{shell.stop(service, fact.init)}",
            )
        if service is shell.SLURMDBD and "database" in fact.own_made:
            make.add(
                StepStage.STOP_CONTROL,
                f"no database {DATABASE}, no user {DATABASE_USER} in it",
                shell.has_no_database(),
                f"mariadb -e 'drop database if exists {DATABASE};"
                f" drop user if exists {DATABASE_USER}@localhost'",
            )
    # Before their files: the removal scripts of packages read slurm.conf.
    if has_packages_removed and fact.own_packages:
        names = " ".join(sorted(fact.own_packages))
        make.add(
            StepStage.CLEAN,
            f"no packages {names}",
            f"! {apt.is_in_state(names, apt.INSTALLED)}",
            apt.remove_packages(sorted(fact.own_packages)),
            INSTALL_S,
        )
    for path in WATCHED:
        if fact.is_own(path) or (fact.was_own(path) and path not in fact.files):
            make.add(StepStage.CLEAN, f"no {path} of Shoal's", *shell.removal(path))
    if fact.was_own(MUNGE_KEY):
        make.add(
            StepStage.CLEAN,
            "munged runs if it had a key before Shoal",
            f"[ ! -e {MUNGE_KEY} ] || {shell.is_running(shell.MUNGE, fact.init)}",
            shell.start(shell.MUNGE, fact.init, "before"),
        )
    if "names" in fact.own_made:
        title = "no names of the cluster in /etc/hosts"
        make.add(StepStage.CLEAN, title, shell.has_no_names(), shell.remove_names())
    for path in sorted(filter(_is_mark, fact.own_made)):
        make.add(StepStage.CLEAN, f"no {path}", f"[ ! -e {path} ]", remove_shared_mark(path))
    for folder in sorted(item for item in fact.own_made if item.startswith("/") and not _is_mark(item)):
        make.add(
            StepStage.CLEAN,
            f"no folder {folder}",
            f"[ ! -e {folder} ] && [ ! -L {folder} ]",
            f"rm -rf --one-file-system {folder}",
        )
    make.add(
        StepStage.CLEAN,
        f"no record in {STATE_DIR}",
        f"[ ! -e {STATE_DIR} ]",
        # The claim goes last: without it, the remaining files would belong to no cluster.
        f"set -eu\nfind {STATE_DIR} -xdev -mindepth 1 ! -path {STATE_DIR}/cluster -delete\n"
        f"rm -rf --one-file-system {STATE_DIR}",
    )
    return make.steps


def _is_mark(path: str) -> bool:
    return path.endswith(f"/{SHARED_MARK}")


def remaining_files_text(fact: Facts, *, has_packages_removed: bool) -> list[str]:
    """Return sentences about what stays on a machine that leaves, and why."""
    parts = [
        f"{path} stays: it was changed since Shoal wrote it"
        for path in WATCHED
        if path in fact.files and not fact.is_own(path) and fact.was_own(path)
    ]
    if others := sorted(fact.databases - MARIADB_OWN):
        parts.append(f"mariadb keeps running: it has {', '.join(others)}, too")
    if fact.own_packages and not has_packages_removed:
        names = " ".join(sorted(fact.own_packages))
        parts.append(f"packages stay: apt-get remove {names}")
    return parts


def _serves_others(service: shell.Daemon, fact: Facts) -> bool:
    """Whether the daemon keeps running: a MariaDB that was there before Shoal or that others use by now, or a
    munged with a key of its own.
    """
    if service is shell.MUNGE:
        return not fact.is_own(MUNGE_KEY)
    if service is not shell.MARIADB:
        return False
    return service.package not in fact.own_packages or bool(fact.databases - MARIADB_OWN)


def drain_step(host: InventoryHost, inventory: Inventory, *, is_forced: bool, is_away: bool = False) -> Step:
    """Drain a machine that leaves: no new job goes there, none runs there. If refused, it takes jobs as
    before.

    It is drained only when no job is active there; if a job starts at that moment, the drain is taken back. A
    machine that is away gets the step on the controller, because only Slurm knows: `down` is enough.
    """
    node, about = host.label, inventory.controller if is_away else host
    which, is_down = f"-w {node}", f"scontrol show node {node} | grep -q '^ *State=DOWN'"
    is_quiet, none_goes_on = (
        f"{{ {is_down} || {no_jobs}; }}" if is_away else no_jobs
        for no_jobs in (_no_jobs(which), _no_jobs(which, GOING_ON))
    )
    is_out = _is_unknown_node(node)
    if is_forced:
        is_out += " || ! scontrol show config >/dev/null 2>&1"
    look_first = "" if is_forced else f"{none_goes_on} || refuse\n"
    end = f"{_end_jobs(which)}\nrefuse" if is_forced else "refuse"
    if is_away and is_forced:
        end = _mark_down(host)
    undrained = f"echo '{node} was drained, and takes jobs as before' >&2"
    back = f"{_is_drained_by_us(node)} && {_undrain(node)} && {undrained}"
    return Step(
        host=about.address,
        label=about.label,
        stage=StepStage.PREPARE,
        title=f"node {node} takes no new jobs, and none runs there",
        check=f"{is_out} || {{ scontrol show node {node} | grep -q DRAIN && {is_quiet}; }}",
        apply=f"""\
refuse() {{
{_name_jobs(which, inventory, is_forced=is_forced)}
{back}
exit 1
}}
{look_first}scontrol show node {node} | grep -q DRAIN ||
  scontrol update nodename={node} state=drain reason={LEAVES} || exit 1
{_await_ends(which, is_quiet)}
{end}""",
        on=inventory.controller.address,
        needs_decision=True,
    )


def undrain_step(host: InventoryHost, inventory: Inventory) -> Step:
    """Undrain a machine that does not leave after all: it takes jobs as before."""
    node = host.label
    return Step(
        host=host.address,
        label=node,
        stage=StepStage.PREPARE,
        title=f"node {node} takes jobs as before",
        check=f"{_is_unknown_node(node)} || {{ scontrol ping && ! {_is_drained_by_us(node)}; }}",
        apply=_undrain(node),
        on=inventory.controller.address,
    )


def _is_unknown_node(node: str) -> str:
    return f"scontrol show node {node} 2>&1 | grep -qx 'Node {node} not found'"


def _is_drained_by_us(node: str) -> str:
    """Whether Shoal drained it: other drains have another reason. A down node keeps our reason after the
    drain.
    """
    both = f"^ *State=[^ ]*DRAIN|^ *Reason={LEAVES} "
    return f"[ \"$(scontrol show node {node} 2>/dev/null | grep -Ec '{both}')\" = 2 ]"


def _undrain(node: str) -> str:
    """Take back the drain. `resume` would also clear the down state of a dead machine."""
    return f"scontrol update nodename={node} state=undrain"


def quiesce_step(inventory: Inventory, *, is_forced: bool, away: Iterable[InventoryHost] = ()) -> Step:
    """Before a cluster is taken down: check that no job runs anywhere.

    A slurmctld that does not answer has not reported that, because jobs outlive it. Only a slurmctld that
    Shoal itself stopped, in an earlier `destroy` that was interrupted, had none. `away`: machines that do not
    answer us. With `--force`, Slurm marks them down, or it would wait for them.
    """
    may_be_silent = "true" if is_forced else shell.is_being_stopped(shell.SLURMCTLD)
    is_silent = f"{{ {may_be_silent} && ! scontrol ping >/dev/null 2>&1; }}"
    down = "".join(f"{_mark_down(host)}\n" for host in away) if is_forced else ""
    return Step(
        host=inventory.controller.address,
        label=inventory.controller.label,
        stage=StepStage.PREPARE,
        title="no job runs",
        check=f"{is_silent} || {_no_jobs('')}",
        apply=f"{down}{_await_ends('', _no_jobs(''))}\n{_end_jobs('') if is_forced else ''}\n"
        f"{_name_jobs('', inventory, is_forced=is_forced)}\nexit 1",
        needs_decision=True,
    )


def _mark_down(host: InventoryHost) -> str:
    """Mark the node down: Slurm ends or requeues its jobs and waits for no process there."""
    return f"scontrol update nodename={host.label} state=down reason={LEAVES}"


def _jobs(which: str, states: str = f"{GOING_ON},completing") -> str:
    return f"squeue -h {which} -t {states} -o %i".replace("  ", " ")


def _no_jobs(which: str, states: str = f"{GOING_ON},completing") -> str:
    """Whether there are no jobs. A Slurm that does not answer does not count as one without jobs."""
    return f'{{ jobs=$({_jobs(which, states)}) && [ -z "$jobs" ]; }}'


def _await_ends(which: str, is_quiet: str) -> str:
    """Succeed when all is quiet. Wait for jobs that are ending already, such as cancelled ones."""
    none_goes_on = _no_jobs(which, GOING_ON)
    return f"for i in $(seq 60); do {is_quiet} && exit 0; {none_goes_on} || break; sleep 1; done"


def _end_jobs(which: str) -> str:
    """Succeed when no job is left."""
    return f"""\
for job in $({_jobs(which)}); do scontrol requeue $job 2>/dev/null || scancel $job; done
for i in $(seq 60); do {_no_jobs(which)} && exit 0; sleep 1; done"""


def _name_jobs(which: str, inventory: Inventory, *, is_forced: bool) -> str:
    """Say which jobs are in the way, and what ends them: Shoal ends its own.

    Names may hold newlines, and what looks like another job, so every line begins with a random mark. If
    Slurm does not answer, the message says how to start it, or that there is another way.
    """
    wait = '"; wait for " (n == 1 ? "it" : "them") ", or say --force: then " (n == 1 ? "it is" : "they are")'
    ending = f'(n == 1 ? " runs" : " run") " there" {wait} " queued again or lost"'
    unless = "; or say --force: what runs is lost"
    if is_forced:
        ending, unless = '(n == 1 ? " does" : " do") " not end"', ""
    return f"""\
export mark=$(od -An -N16 -tx8 /dev/urandom | tr -d ' ')
SQUEUE_FORMAT="$mark %i %j" {_jobs(which).removesuffix(" -o %i")} | awk '
$1 == ENVIRON["mark"] {{
  ids = ids (n++ ? ", " : "") $2
  if ($3 ~ /^shoal-/) own = 1; else others = others " " $2
}}
END {{
  if (!n) {{
    print "Slurm does not say which jobs run there"
    print "hint: `shoal cluster create --name {inventory.cluster}` starts slurmctld if it is down{unless}"
    exit
  }}
  print "Slurm\\047s job" (n == 1 ? " " : "s ") ids {ending}
  print "hint: " (own ? "`shoal stop JOB` (`shoal queue` lists them)" : "") (own && others ? ", and " : "") \\
    (others ? "`scancel" others "` on {inventory.controller.label}" : "")
}}' >&2"""


def upgrade_rounds(inventory: Inventory, facts: Mapping[str, Facts]) -> list[list[Step]]:
    """Newer packages, in rounds: the database's machine, the controller, then the rest.

    Slurm's own rule: slurmdbd is never older than slurmctld, and slurmctld never older than slurmd.
    """
    rounds: list[list[Step]] = [[], [], []]
    for host in inventory.hosts:
        if (fact := facts.get(host.address)) is None:
            continue
        make = StepBuilder(host, fact)
        packages = packages_of(host)
        title = f"newest packages {' '.join(packages)}"
        make.add(StepStage.PREPARE, title, apt.are_newest(packages), apt.upgrade(packages), INSTALL_S)
        turn = 0 if host.has(HostRole.DATABASE) else 1 if host.has(HostRole.CONTROLLER) else 2
        rounds[turn] += make.steps
    return [steps for steps in rounds if steps]
