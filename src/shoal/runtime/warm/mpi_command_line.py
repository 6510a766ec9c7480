"""Parse a command line of `mpirun`, and write the one for the real `mpirun`. Pure.

The supervisor has already started the ranks on their nodes. So options that choose hosts, slots or the order
of ranks are removed, and a count that contradicts the job is refused. All other options are passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .launchers import QUERIES

COUNT = {"-n", "-np", "--n", "--np", "-c"}
PER_NODE = {"-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost", "--perhost"}
PAIRS = {"--mca", "-mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "--gprtemca", "--gpmixmca"}
"""Options with two values, including `-genv` and `-env`."""
SET = {"-genv", "-env"}
EXPORT = {"-x", "-genvlist", "-envlist"}
FLAGS = {
    *("--report-bindings", "-report-bindings", "-l", "-prepend-rank", "-q", "--quiet", "-v", "--verbose"),
    *("-verbose", "--tag-output", "-tag-output", "--timestamp-output", "-timestamp-output", "--xml", "-xml"),
    *("--merge-stderr-to-stdout", "--display-map", "-display-map", "--display-devel-map"),
    *("--display-allocation", "-display-allocation", "--display-topo", "--use-hwthread-cpus", "--continuous"),
    *("--enable-recovery", "--disable-recovery", "--get-stack-traces", "--report-state-on-timeout"),
    *("--show-progress", "--do-not-launch", "--do-not-resolve", "--debug-devel", "-d", "--novm", "-info"),
    *("-print-all-exitcodes", "-disable-auto-cleanup", "-disable-hostname-propagation"),
    *("-bind-to-core", "--bind-to-core", "-bind-to-socket", "--bind-to-socket", "-bind-to-none"),
    *("--bind-to-none",),
}
"""Options without a value that are passed on."""
OURS_FLAGS = {
    *("--allow-run-as-root", "--oversubscribe", "-oversubscribe", "--nooversubscribe", "-nooversubscribe"),
    *("--bynode", "-bynode", "--byslot", "-byslot", "--nolocal", "-nolocal", "-loadbalance", "--loadbalance"),
    *("-genvall", "-envall", "-genvnone", "-envnone", "--leave-session-attached", "--no-local", "-rr"),
}
"""Options without a value that are removed, because the job decides this."""
OURS = {
    *("-H", "-host", "--host", "-hosts", "--hosts", "-hostlist", "-f", "-hostfile", "--hostfile", "-machine"),
    *("-machinefile", "--machinefile", "--default-hostfile", "-default-hostfile", "-rankfile", "--rankfile"),
    *("-rf", "--map-by", "-map-by", "--rank-by", "-rank-by", "-npersocket", "--npersocket", "-cpus-per-proc"),
    *("-cpus-per-rank", "--cpus-per-rank", "--cpus-per-proc", "-grr", "-launcher", "-launcher-exec", "-rmk"),
    *("-bootstrap", "-bootstrap-exec", "-localhost", "-iface", "--launch-agent", "-launch-agent", "-usize"),
    *("--personality", "--ppr", "-ppr", "--path", "-path"),
}
"""Options with a value that are removed."""
OURS_PREFIXES = ("plm", "ras", "rmaps", "orte_default_hostfile", "prte_default_hostfile", "orte_leave")
"""Prefixes of `--mca` names that the job decides."""
DIRECTORY = {"-wdir", "--wdir", "-wd", "--wd", "--set-cwd-to"}
FILES = {"--app", "-app", "-configfile", "--configfile"}
"""Options that name a file with more of the command line."""
OPEN_MPI_4, OPEN_MPI_5, HYDRA = "Open MPI 4", "Open MPI 5", "MPICH"
HOST = "shoal-mpi-"
"""The prefix of a node's name for the launcher, before its number. It need not be resolvable."""


class MpiProgram:
    """One program of the command line, with the options before it."""

    def __init__(self) -> None:
        self.count: str | None = None
        self.per_node: str | None = None
        self.file: str | None = None
        self.directory: str | None = None
        self.variables: dict[str, str] = {}
        self.options: list[str] = []
        """Options that are passed on."""
        self.argv: list[str] = []
        """The program and its arguments."""


def read(arguments: list[str], is_program: Callable[[str], bool]) -> list[MpiProgram]:
    """Parse a command line. `:` separates programs. A program is the first word that belongs to no option.

    `is_program` decides whether the word after an unknown option is its value.
    """
    programs, start = [], 0
    for end in [at for at, word in enumerate(arguments) if word == ":"] + [len(arguments)]:
        programs.append(_read(arguments[start:end], is_program))
        start = end + 1
    return programs


def _read(arguments: list[str], is_program: Callable[[str], bool]) -> MpiProgram:
    program, at = MpiProgram(), 0
    while at < len(arguments) and arguments[at].startswith("-"):
        name, sign, value = arguments[at].partition("=")
        if sign and not name.startswith("--"):
            name, sign = arguments[at], ""
        width = 1 if sign else _width(name, arguments[at + 1 :], is_program)
        values = [value] if sign else arguments[at + 1 : at + width]
        _note(program, name, values, arguments[at : at + width])
        at += width
    program.argv = arguments[at:]
    return program


def _width(name: str, rest: list[str], is_program: Callable[[str], bool]) -> int:
    if name in FLAGS or name in OURS_FLAGS or name in ("-pernode", "--pernode"):
        return 1
    if name in PAIRS or name in SET:
        return 3
    if name in COUNT | PER_NODE | EXPORT | OURS | FILES | DIRECTORY:
        return 2
    is_flag = not rest or rest[0].startswith("-") or (is_program(rest[0]) and not rest[0].isdigit())
    return 1 if is_flag else 2


def _note(program: MpiProgram, name: str, values: list[str], arguments: list[str]) -> None:
    first = values[0] if values else ""
    if name in COUNT:
        program.count = first
    elif name in PER_NODE or name in ("-pernode", "--pernode"):
        program.per_node = first or "1"
    elif name in FILES:
        program.file = name
    elif name in DIRECTORY:
        program.directory = first
    elif name in SET and len(values) == 2:
        program.variables[first] = values[1]
    elif name == "-x":
        variable, sign, value = first.partition("=")
        program.variables.update({variable: value} if sign else {})
    elif name in PAIRS and first.startswith(OURS_PREFIXES):
        return
    elif name not in OURS and name not in OURS_FLAGS and name not in EXPORT:
        program.options += arguments


def query(programs: list[MpiProgram]) -> str | None:
    """Return the option with which the launcher describes itself and starts nothing, or None."""
    options_given = [option for one in programs for option in one.options]
    return next((option for option in options_given if option in (*QUERIES, "-info")), None)


def problem(programs: list[MpiProgram], world: int, local_world: int) -> tuple[str, str]:
    """Return what is wrong with the command in this job, and a hint. Both are empty if it is right."""
    file = next((one.file for one in programs if one.file), None)
    if file is not None:
        return f"has the option `{file}`, whose file Shoal does not read", "write its options in `run`"
    if not all(one.argv for one in programs):
        return "has no program behind its options", "write `mpirun PROGRAM` in `run`"
    if len(programs) > 1 and not all(one.count for one in programs):
        return "has several programs and no number of processes for each", "write `-n` before each program"
    counts = [one.count for one in programs if one.count is not None]
    wrong = next((count for count in counts if not count.isdigit() or int(count) == 0), None)
    if wrong is not None:
        return f"asks for `{wrong}` processes, which is no number", "leave the option out"
    nodes = max(1, world // local_world)
    total = sum(map(int, counts))
    if counts and total != world:
        message = f"asks for {total} processes, and the job has {world}"
        if total % nodes:
            return message, f"write `-n {world}`, or leave the option out"
        return message, f"set `ranks_per_node: {total // nodes}` in the job, or leave the option out"
    for each in (one.per_node for one in programs):
        if each is not None and each != str(local_world):
            message = f"asks for {each} processes on each node, and the job has {local_world}"
            return message, f"set `ranks_per_node: {each}` in the job, or leave the option out"
    return "", ""


def flavour(version: str) -> str | None:
    """Return the kind of MPI from the launcher's version text. None: Shoal does not know it."""
    match = re.search(r"\((?:Open MPI|OpenRTE)\)\s+v?(\d+)", version)
    if match is not None:
        return OPEN_MPI_4 if int(match[1]) < 5 else OPEN_MPI_5
    if re.search(r"\bPRRTE\b|\bprterun\b", version):
        return OPEN_MPI_5
    return HYDRA if "HYDRA build details" in version else None


def options(kind: str, *, agent: str, hosts: str, address: str, is_root: bool) -> list[str]:
    """Return the real launcher's first options: Shoal's hosts, and Shoal's agent in place of ssh.

    `hosts`: a file with `host_lines`. `address`: the address at which daemons of other nodes reach this one.
    """
    if kind == HYDRA:
        to_hosts = ["-launcher", "ssh", "-launcher-exec", agent, "-rmk", "user", "-localhost", address]
        return [*to_hosts, "-f", hosts, "-genvnone"]
    # The daemons stay in the session of the rank that started them, so that the supervisor finds them.
    values = {
        OPEN_MPI_4: (
            *(("plm", "rsh"), ("plm_rsh_agent", agent), ("plm_rsh_no_tree_spawn", "1")),
            *(("orte_leave_session_attached", "1"), ("if_base_do_not_resolve", "1"), ("ras", "^slurm")),
        ),
        OPEN_MPI_5: (
            *(("plm", "ssh"), ("plm_ssh_agent", agent), ("plm_ssh_no_tree_spawn", "1")),
            *(("prte_leave_session_attached", "1"), ("ras", "^slurm")),
        ),
    }[kind]
    word = "--mca" if kind == OPEN_MPI_4 else "--prtemca"
    mca = [part for name, value in values for part in (word, name, value)]
    if kind == OPEN_MPI_4 and address.startswith("127."):
        mca += ["--mca", "oob_tcp_if_include", "lo"]
    as_root = ["--allow-run-as-root"] if is_root else []
    return [*as_root, *mca, "--hostfile", hosts, "--map-by", "slot:OVERSUBSCRIBE"]


def host_lines(kind: str, nodes: int, local_world: int) -> str:
    """Return the content of the host file: every node of the job with its ranks."""
    form = f"{HOST}{{}}:{local_world}\n" if kind == HYDRA else f"{HOST}{{}} slots={local_world}\n"
    return "".join(form.format(number) for number in range(nodes))


def command(
    real: str, before: list[str], programs: list[MpiProgram], world: int, place: list[str]
) -> list[str]:
    """Return the command of the real launcher. It starts `place` for each process."""
    argv = [real, *before]
    bound = any(option.lstrip("-").startswith("bind-to") for one in programs for option in one.options)
    if not bound:
        argv += ["--bind-to", "none"] if "--hostfile" in before else ["-bind-to", "none"]
    for number, program in enumerate(programs):
        argv += [":"] if number else []
        # Nodes may have the work directory at different paths, and the ranks already run in theirs.
        argv += [*program.options, "-wdir", "/", "-n", program.count or str(world), *place]
        argv += [f"-wdir={program.directory}"] if program.directory is not None else []
        argv += [*(f"{name}={value}" for name, value in program.variables.items()), "--", *program.argv]
    return argv


def node_of(host: str) -> int | None:
    """Return the number of the node for a host name of Shoal's, or None for any other name."""
    number = host.removeprefix(HOST)
    return int(number) if host.startswith(HOST) and number.isdigit() else None
