"""The clients of a node's MPI host (`mpi_host`): ranks, ssh agents and placeholder processes.

The real `mpirun` starts daemons through `agent`, and `process` for each rank. `process` runs no program. It
hands the variables and descriptors from MPI to the rank that the supervisor has started, which waits in
`become` and then becomes the program. So an MPI rank is an ordinary rank with its own process, log, signals
and exit code.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import time
from typing import Any

from . import launchers, mpi_command_line, mpirun

RENDEZVOUS_S, WARN_S, PAUSE_S = 1800.0, 60.0, 0.02
"""How long ranks wait for each other (some have a long preparation), when they first print that, and the
pause between tries."""
SETTLE_S = 5.0
"""How long a rank without a place outlives its world, because the job should name the rank that failed
first."""
MAX_MESSAGE = 64 << 20
WORLD = "SHOAL_MPI"
"""Set in a rank that is in an MPI world, to the kind of its MPI."""
BOARD = "SHOAL_BOARD"
NUMBERS = {
    *("OMPI_VERSION", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK", "PMI_SIZE", "PMI_PORT"),
    *("PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDRA_RMK", "HYDRA_LAUNCHER"),
}
"""Variables that the supervisor sets under MPI's names. The real launcher sets them itself."""
OTHER_MPI = {True: {"OMPI_MCA_op": mpirun.ALONE}, False: {"PMI_PORT": "127.0.0.1:1"}}
"""By whether the launcher is MPICH's: variables that make a program of the other MPI fail instead of
running alone."""
LAUNCHER_PREFIXES = (
    "OMPI_",
    "OPAL_",
    "ORTE_",
    "PRTE_",
    "PMIX_",
    "PMI_",
    "HYDRA_",
    "HYDI_",
    "MPI_LOCAL",
    "MPIR_",
    "MPIEXEC_",
)
"""Prefixes of variables that a launcher sets for its processes."""
LIBRARIES = ("LD_LIBRARY_PATH",)


def clean(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment without the variables that the supervisor sets under MPI's names."""
    return {
        name: value for name, value in environment.items() if name not in NUMBERS and value != mpirun.ALONE
    }


def for_launcher(environment: dict[str, str], without: str) -> dict[str, str]:
    """Return the environment of the real launcher and its daemons: also without Slurm's variables and
    stand-ins.
    """
    variables = {name: value for name, value in clean(environment).items() if not name.startswith("SLURM")}
    path = [entry for entry in variables.get("PATH", os.defpath).split(":") if entry != without]
    return {**variables, "PATH": ":".join(path), launchers.MARK: "mpirun"}


def connect(folder: str) -> socket.socket:
    """Connect to the node's host. `OSError`: it is not there."""
    here = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        door.connect(f"/proc/self/fd/{here}/host")  # by descriptor: the path itself may be too long
    except OSError:
        door.close()
        raise
    finally:
        os.close(here)
    return door


def send(connection: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([len(data).to_bytes(4, "big")], rights)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next message and its descriptors. None: the other side has closed the connection."""
    head, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_WAITALL)
    fds = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    length, data = int.from_bytes(head, "big"), b""
    if len(head) < 4 or length > MAX_MESSAGE:
        return None, list(fds)
    while len(data) < length:
        chunk = connection.recv(length - len(data))
        if not chunk:
            return None, list(fds)
        data += chunk
    return json.loads(data), list(fds)


def become(stand_ins: str, folder: str, rank: int, name: str) -> None:
    """Wait for a place in the world of `folder`, and become the program. Never returns."""
    door = _connect_to_host(folder, name)
    send(door, {"rank": rank})
    message, fds = receive(door)
    if message is None or "argv" not in message:
        time.sleep(SETTLE_S)
        os._exit(1 if message is None else message["code"])  # the node's host has printed why
    is_mpich = "PMI_SIZE" in message["env"]
    environment = {**clean(dict(os.environ)), **OTHER_MPI[is_mpich], **message["env"]}
    environment.pop(BOARD, None)  # an MPI world cannot continue after the loss of a rank
    if fds:
        environment["PMI_FD"] = str(fds[0])
        os.set_inheritable(fds[0], True)  # noqa: FBT003
    launchers.append_report(stand_ins, "mpi", message["size"], message["place"])
    os.environ.clear()
    os.environ.update(environment)
    program = message["argv"]
    try:
        if message["cwd"] is not None:
            os.chdir(message["cwd"])
        if message["cpus"]:
            os.sched_setaffinity(0, message["cpus"])
        os.execvp(program[0], program)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: `{name}` cannot start `{program[0]}`: {error.strerror}\n")
        os._exit(127)


def _connect_to_host(folder: str, name: str) -> socket.socket:
    """Connect to the host that the node's first rank opens. Other ranks may be earlier, so they retry."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            return connect(folder)
        except OSError:
            waited_s = time.monotonic() - began
        if waited_s > RENDEZVOUS_S:
            sys.stderr.write(
                f"shoal: the first rank of this node has not come to `{name}` for {RENDEZVOUS_S:g} s\n"
            )
            os._exit(1)
        if waited_s > WARN_S and not is_told:
            is_told = True
            sys.stderr.write(f"shoal: `{name}` waits for the first rank of this node to come to it\n")
        time.sleep(PAUSE_S)


def agent(folder: str, arguments: list[str]) -> None:
    """Act as ssh for the real launcher: run a command on the named node. Never returns."""
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[1:]
    node = mpi_command_line.node_of(arguments[0]) if arguments else None
    if node is None:
        sys.stderr.write(f"shoal: no node of this job is called `{' '.join(arguments[:1])}`\n")
        os._exit(255)
    door = connect(folder)
    send(door, {"start": " ".join(arguments[1:]), "node": node})
    message, _ = receive(door)
    os._exit(255 if message is None else message["status"])


def process(folder: str, arguments: list[str]) -> None:
    """Hand the place in the world to the rank, and end when the rank ends. Never returns.

    The real launcher starts this for each rank.
    """
    at = arguments.index("--")
    given = dict(word.split("=", 1) for word in arguments[:at])
    directory = given.pop("-wdir", None)
    variables = dict(os.environ)
    rank = variables.get("PMI_RANK", variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMIX_RANK", "")))
    size = variables.get("PMI_SIZE", variables.get("OMPI_COMM_WORLD_SIZE", ""))
    environment = {name: value for name, value in variables.items() if name.startswith(LAUNCHER_PREFIXES)}
    environment |= {name: variables[name] for name in LIBRARIES if name in variables}
    fd = environment.pop("PMI_FD", None)
    message = {
        "place": int(rank),
        "size": int(size),
        "argv": arguments[at + 1 :],
        "env": {**environment, **given},
        "cwd": directory,
        "cpus": sorted(os.sched_getaffinity(0)),
    }
    door = connect(folder)
    send(door, message, (int(fd),) if fd is not None else ())
    if fd is not None:
        os.close(int(fd))
    answer, _ = receive(door)
    if answer is not None and "problem" in answer:
        sys.stderr.write(f"shoal: {answer['problem']}\n")
        os._exit(2)
    os._exit(0)
