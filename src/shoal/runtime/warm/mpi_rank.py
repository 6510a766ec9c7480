"""The short-lived parts of an MPI world on one node, each a client of the node's host (`mpi_host`).

The real `mpirun` starts daemons through `agent`, and for each process `process`. That is no program: it
hands what MPI gave to it to the rank that the supervisor has started, which waits in `become` and is the
program. So a rank of MPI is a rank like any other: its own process, log, signals and exit code.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import time
from typing import Any

from . import launchers, mpi_line, mpirun

MEET_S, WARN_S, PAUSE_S = 1800.0, 60.0, 0.02
"""How long ranks wait for each other, as some come from a long preparation; when they first say so."""
SETTLE_S = 5.0
"""How long a rank without a place outlives its world: the job should name the rank that failed first."""
MAX_MESSAGE = 64 << 20
WORLD = "SHOAL_MPI"
"""Of a rank that is in an MPI world: whose it is."""
BOARD = "SHOAL_BOARD"
NUMBERS = {
    *("OMPI_VERSION", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "PMI_RANK", "PMI_SIZE", "PMI_PORT"),
    *("PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDRA_RMK", "HYDRA_LAUNCHER"),
}
"""What the supervisor says in MPI's words; the real launcher says it itself."""
OTHERS = {True: {"OMPI_MCA_op": mpirun.ALONE}, False: {"PMI_PORT": "127.0.0.1:1"}}
"""By whether a launcher is MPICH's: what still keeps a program of the other MPI from being alone under it."""
GIVEN = (
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
"""What a launcher gives to its processes begins so."""
LIBRARIES = ("LD_LIBRARY_PATH",)


def clean(environment: dict[str, str]) -> dict[str, str]:
    """The environment without what the supervisor says in MPI's words."""
    return {
        name: value for name, value in environment.items() if name not in NUMBERS and value != mpirun.ALONE
    }


def for_launcher(environment: dict[str, str], without: str) -> dict[str, str]:
    """What the real launcher and its daemons find: nothing of Slurm's words either, and no stand-in."""
    found = {name: value for name, value in clean(environment).items() if not name.startswith("SLURM")}
    path = [entry for entry in found.get("PATH", os.defpath).split(":") if entry != without]
    return {**found, "PATH": ":".join(path), launchers.MARK: "mpirun"}


def connect(folder: str) -> socket.socket:
    """A connection to the node's host. `OSError`: it is not there."""
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


def send(door: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    door.sendmsg([len(data).to_bytes(4, "big")], rights)
    door.sendall(data)


def receive(door: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the descriptors with it; None: the other side has ended."""
    head, rights, _, _ = door.recvmsg(4, socket.CMSG_SPACE(4), socket.MSG_WAITALL)
    fds = array.array("i")
    for level, kind, data in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    length, data = int.from_bytes(head, "big"), b""
    if len(head) < 4 or length > MAX_MESSAGE:
        return None, list(fds)
    while len(data) < length:
        chunk = door.recv(length - len(data))
        if not chunk:
            return None, list(fds)
        data += chunk
    return json.loads(data), list(fds)


def become(stand_ins: str, folder: str, rank: int, name: str) -> None:
    """Wait to be given a place in the world of `folder`, and become the program. Never returns."""
    door = _meet(folder, name)
    send(door, {"rank": rank})
    message, fds = receive(door)
    if message is None or "argv" not in message:
        time.sleep(SETTLE_S)
        os._exit(1 if message is None else message["code"])  # the node's host has said why
    is_mpich = "PMI_SIZE" in message["env"]
    environment = {**clean(dict(os.environ)), **OTHERS[is_mpich], **message["env"]}
    environment.pop(BOARD, None)  # a world of MPI does not go on without one of its ranks
    if fds:
        environment["PMI_FD"] = str(fds[0])
        os.set_inheritable(fds[0], True)  # noqa: FBT003
    launchers.tell(stand_ins, "mpi", message["size"], message["place"])
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


def _meet(folder: str, name: str) -> socket.socket:
    """The node's first rank opens the place where its others come to; they may be earlier."""
    began, is_told = time.monotonic(), False
    while True:
        try:
            return connect(folder)
        except OSError:
            waited_s = time.monotonic() - began
        if waited_s > MEET_S:
            sys.stderr.write(
                f"shoal: the first rank of this node has not come to `{name}` for {MEET_S:g} s\n"
            )
            os._exit(1)
        if waited_s > WARN_S and not is_told:
            is_told = True
            sys.stderr.write(f"shoal: `{name}` waits for the first rank of this node to come to it\n")
        time.sleep(PAUSE_S)


def agent(folder: str, arguments: list[str]) -> None:
    """Be to the real launcher what ssh would be: run a command on the node that is named. Never returns."""
    while arguments and arguments[0].startswith("-"):
        arguments = arguments[1:]
    node = mpi_line.node_of(arguments[0]) if arguments else None
    if node is None:
        sys.stderr.write(f"shoal: no node of this job is called `{' '.join(arguments[:1])}`\n")
        os._exit(255)
    door = connect(folder)
    send(door, {"start": " ".join(arguments[1:]), "node": node})
    message, _ = receive(door)
    os._exit(255 if message is None else message["status"])


def process(folder: str, arguments: list[str]) -> None:
    """What the real launcher starts for each rank: hand over the place in the world, and end when the rank
    does. Never returns.
    """
    at = arguments.index("--")
    given = dict(word.split("=", 1) for word in arguments[:at])
    directory = given.pop("-wdir", None)
    found = dict(os.environ)
    rank = found.get("PMI_RANK", found.get("OMPI_COMM_WORLD_RANK", found.get("PMIX_RANK", "")))
    size = found.get("PMI_SIZE", found.get("OMPI_COMM_WORLD_SIZE", ""))
    environment = {name: value for name, value in found.items() if name.startswith(GIVEN)}
    environment |= {name: found[name] for name in LIBRARIES if name in found}
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
