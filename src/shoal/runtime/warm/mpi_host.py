"""The host of an MPI world on one node. The node's first rank starts it, and it lives as long as the world.

The host of the first node runs the real `mpirun` with Shoal's agent in place of ssh. On request, the hosts of
the other nodes start its daemons, over channels that only this rank group can open. The processes that the
daemons start hand their place in the world to the ranks that the supervisor has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import selectors
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from . import mpi_command_line, mpi_rank, mpi_rendezvous
from .mpi_rendezvous import Channel, UntrustedPeer
from .stand_in import end_as

TURN_S = 1.0
SETTLE_S = 5.0
"""How long a failed launcher is not reported, because the job should name the rank that failed first."""
PATIENCE_S = 10.0
"""How long a client on this node may take to send its request."""
PR_SET_PDEATHSIG = 1
SHELL, NOT_STARTED = "/bin/sh", 127
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
START = (
    "import sys; sys.path[0:1] = [{lib!r}]; from shoal_warm import mpi_rank; "
    "mpi_rank.{what}({folder!r}, sys.argv[1:])"
)
SCRATCH = "tmp"
"""The scratch directory of the launcher and its daemons, below the world's folder."""
AGENT = "shoal-mpi-agent"
SCRIPTS = {"agent": AGENT, "process": "shoal-mpi-process"}
"""Shoal's scripts by purpose. Daemons find them on PATH, because nodes may have them at different paths."""
PLACE = ["/bin/sh", "-c", 'exec shoal-mpi-process "$@"', "sh"]
"""The command that the launcher starts for each rank."""
_libc = ctypes.CDLL(None)


class MpiWorldFailed(Exception):
    """The world cannot begin, or has broken. The message says why."""


class MpiWorld:
    """The identity of one world, from the environment that all its ranks share."""

    def __init__(self, folder: str, environment: dict[str, str], count: int) -> None:
        """`count`: how many worlds these ranks have already formed in this round."""
        self.size = int(environment["SHOAL_WORLD_SIZE"])
        self.local_size = int(environment["SHOAL_RANKS_PER_NODE"])
        self.node = int(environment["SHOAL_NODE_RANK"])
        self.nodes = int(environment["SHOAL_NUM_NODES"])
        self.address, self.port = environment["SHOAL_MASTER_ADDR"], int(environment["SHOAL_MASTER_PORT"])
        group = environment["SHOAL_RENDEZVOUS_ROUND"]
        self.folder = os.path.join(folder, "mpi", f"{group}.{count}")
        self.stand_ins, self.lib = os.path.join(folder, "bin"), os.path.join(folder, "lib")
        self.token = environment.get("SHOAL_TOKEN", "")
        parts = (environment["SHOAL_ATTEMPT_ID"], environment["SHOAL_EPOCH"], group, str(count))
        self.key = mpi_rendezvous.key_of(self.token, " ".join(parts))


class MpiLaunch:
    """The launch on the first node: the real launcher, its kind and the programs."""

    def __init__(self, name: str, real: str, kind: str, programs: list[mpi_command_line.MpiProgram]) -> None:
        self.name, self.real, self.kind, self.programs = name, real, kind, programs


class MpiHost:
    """The host process. It has one thread, and `run` never returns."""

    def __init__(self, world: MpiWorld, launch: MpiLaunch) -> None:
        """Open the socket for this node's ranks. The caller forks the first rank and then calls `run`."""
        self._world, self._launch = world, launch
        self._address = world.address
        self._is_simulated = False
        """Whether nodes of this world are simulated on one machine."""
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, Channel] = {}
        """Channels to other nodes by number. Only the first node has more than one."""
        self._ranks: dict[int, socket.socket] = {}
        """Ranks of this node that have connected and wait for their place."""
        self._places: dict[int, tuple[dict[str, Any], list[int], socket.socket]] = {}
        """Places that the launcher has made here and that no rank has yet."""
        self._has_given = False
        self._children: dict[int, Callable[[int], None]] = {}
        """Child processes, and the callback for their status."""
        self._waiting_agents: dict[int, socket.socket] = {}
        """Agents that wait for a daemon of another node to end, by request number."""
        self._num_requests = 0
        self._rank_status: int | None = None
        self._over: int | None = None
        """The launcher's exit code, once the world is over."""
        self._is_terminating = False
        for part in (SCRATCH, "bin"):
            os.makedirs(f"{world.folder}/{part}", mode=0o700)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        here = os.open(world.folder, os.O_PATH | os.O_DIRECTORY)
        self._listener.bind(f"/proc/self/fd/{here}/host")  # by descriptor: the path itself may be too long
        os.close(here)
        self._listener.listen(256)

    def run(self, rank: int) -> None:
        """Serve until the world is over. End with the status of the child `rank`, or with the launcher's code
        if only the launcher has failed.
        """
        self._children[rank] = self._note_rank
        try:
            self._rendezvous()
            self._listen()
            for what in ("agent", "process"):
                self._write_script(what)
            if self._world.node == 0:
                self._start_launcher()
            self._turn_until(lambda: self._over is not None)
        except (MpiWorldFailed, mpi_rendezvous.MissingNodes, OSError, UntrustedPeer, EOFError) as error:
            sys.stderr.write(f"shoal: `{self._launch.name}`: {error}\n")
            self._over = 1
        self._announce_end()
        if self._over == 0 or self._has_given:
            self._wait_for_rank()
        self._tear_down(self._over or 0)

    def _wait_for_rank(self) -> None:
        """Wait for the rank after the end of the world. If the world failed, wait only a moment, because the
        rank that failed first, here or on another node, should end the job.
        """
        try:
            if self._over == 0:
                self._turn_until(lambda: self._rank_status is not None)
            else:
                self._turn_until(lambda: False, SETTLE_S)
        except (OSError, UntrustedPeer, EOFError) as error:
            sys.stderr.write(f"shoal: `{self._launch.name}`: {error}\n")
            self._over = self._over or 1

    def _rendezvous(self) -> None:
        world = self._world
        if world.nodes == 1:
            return
        if not world.token:
            raise MpiWorldFailed("this job has no token, by which its nodes could know each other")
        if world.node == 0:
            name = self._launch.name
            self._peers, self._is_simulated = mpi_rendezvous.gather(
                world.address, world.port, world.key, world.nodes, name
            )
        else:
            channel, self._is_simulated = mpi_rendezvous.join(
                world.address, world.port, world.key, world.node
            )
            self._peers = {0: channel}
            self._address = str(channel.connection.getsockname()[0])

    def _listen(self) -> None:
        """Ignore signals from now on, because the rank is in the same process group and gets them itself."""
        wake, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore_signal)
        for number in PASSED_ON:
            signal.signal(number, self._on_signal)
        self._watch(wake, lambda: os.read(wake, 4096))
        self._watch(self._listener, self._accept)
        for node, channel in self._peers.items():
            self._watch(channel, functools.partial(self._receive, node, channel))

    def _watch(self, source: Any, act: Callable[[], object]) -> None:
        self._selector.register(source, selectors.EVENT_READ, act)

    def _on_signal(self, number: int, frame: object) -> None:
        self._is_terminating = self._is_terminating or number == signal.SIGTERM

    def _start_launcher(self) -> None:
        world, launch, folder = self._world, self._launch, self._world.folder
        hosts = f"{folder}/hosts"
        with open(hosts, "w", encoding="utf-8") as file:
            file.write(mpi_command_line.host_lines(launch.kind, world.nodes, world.local_size))
        before = mpi_command_line.options(
            launch.kind, agent=AGENT, hosts=hosts, address=world.address, is_root=os.geteuid() == 0
        )
        command = mpi_command_line.command(launch.real, before, launch.programs, world.size, PLACE)
        self._start(command, self._note_launcher)

    def _write_script(self, role: str) -> None:
        world = self._world
        path = f"{world.folder}/bin/{SCRIPTS[role]}"
        code = START.format(lib=world.lib, what=role, folder=world.folder)
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS -c {shlex.quote(code)} "$@"\n')
        os.chmod(path, 0o700)

    def _start(self, command: list[str], note: Callable[[int], None]) -> None:
        """Start a process of the launcher. `note` gets its status.

        The process is in this session and dies with this process. A signal to the rank's process group does
        not reach it.
        """
        environment = mpi_rank.for_launcher(dict(os.environ), self._world.stand_ins)
        environment[mpi_rank.WORLD] = self._launch.kind
        environment["TMPDIR"] = os.path.join(self._world.folder, SCRATCH)
        environment["PATH"] = f"{self._world.folder}/bin:{environment['PATH']}"
        pid = os.fork()
        if pid == 0:
            _become_daemon(command, environment)
        self._children[pid] = note

    def _accept(self) -> None:
        """Accept one client of this node: a rank, an agent, or a process of the launcher."""
        door, _ = self._listener.accept()
        door.settimeout(PATIENCE_S)
        try:
            message, fds = mpi_rank.receive(door)
        except OSError:
            message, fds = None, []  # the client was killed, or sends nothing
        if message is None:
            door.close()
        elif "rank" in message:
            self._ranks[message["rank"]] = door
            self._match_ranks()
        elif "place" in message:
            self._take_place(message, fds, door)
        else:
            self._start_on(message["node"], message["start"], door)

    def _take_place(self, message: dict[str, Any], fds: list[int], door: socket.socket) -> None:
        world, rank, size = self._world, message["place"], message["size"]
        first = world.node * world.local_size
        if size != world.size or not first <= rank < first + world.local_size:
            made = f"the launcher made rank {rank} of {size} on node {world.node}"
            has = f"the job has {world.size} ranks, {world.local_size} on each node"
            mpi_rank.send(door, {"problem": f"{made}; {has}"})
            door.close()
            return
        self._places[rank] = (message, fds, door)
        self._match_ranks()

    def _match_ranks(self) -> None:
        """Give each waiting rank its place."""
        for rank in self._ranks.keys() & self._places.keys():
            door = self._ranks.pop(rank)
            message, fds, launched = self._places.pop(rank)
            pid = _peer_of(door)
            message["env"] |= self._network(message["env"])
            message["env"][mpi_rank.WORLD] = self._launch.kind
            living = os.pidfd_open(pid)
            mpi_rank.send(door, message, tuple(fds))
            for fd in fds:
                os.close(fd)
            door.close()
            self._has_given = True
            self._watch(living, functools.partial(self._end_place, living, launched))

    def _end_place(self, living: int, launched: socket.socket) -> None:
        """End the launcher's process for a rank that is gone."""
        self._selector.unregister(living)
        os.close(living)
        launched.close()

    def _network(self, launcher_environment: dict[str, str]) -> dict[str, str]:
        """Return variables for the network interface, unless the job sets them, and for simulated nodes.

        MPI would take nodes that are simulated on one machine for a single node.
        """
        environment = os.environ
        interface = environment.get("GLOO_SOCKET_IFNAME")
        wanted: dict[str, str] = {}
        if interface is not None:
            wanted |= {"OMPI_MCA_btl_tcp_if_include": interface, "FI_TCP_IFACE": interface}
        if self._is_simulated:
            scratch = os.path.join(self._world.folder, SCRATCH)
            wanted |= {
                "OMPI_MCA_btl_vader_backing_directory": scratch,
                "OMPI_MCA_btl_sm_backing_directory": scratch,
            }
            wanted |= {"OMPI_MCA_coll": "^han"}
        variables = {
            n: value for n, value in wanted.items() if n not in launcher_environment and n not in environment
        }
        # The launcher's node names are no addresses.
        names = ("MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "PMI_HOSTNAME")
        return {**variables, **{name: self._address for name in names if name in launcher_environment}}

    def _start_on(self, node: int, command: str, door: socket.socket) -> None:
        """Start a daemon on the node that the launcher names."""
        if node == self._world.node:
            self._start([SHELL, "-c", command], functools.partial(_answer, door))
        elif self._world.node == 0 and node in self._peers:
            self._num_requests += 1
            self._waiting_agents[self._num_requests] = door
            self._peers[node].send({"start": command, "id": self._num_requests})
        else:
            _answer(door, 255 << 8)

    def _receive(self, node: int, channel: Channel) -> None:
        """Handle a message of another node."""
        message = channel.receive()
        if message is None:
            self._selector.unregister(channel)
            channel.close()
            del self._peers[node]
            if self._over is None:
                raise MpiWorldFailed(f"node {node} has left the world before its end")
        elif "start" in message and node == 0:
            self._start([SHELL, "-c", message["start"]], functools.partial(_tell, channel, message["id"]))
        elif "status" in message and node != 0:
            _answer(self._waiting_agents.pop(message["id"]), message["status"])
        elif "over" in message and node == 0:
            self._over = message["over"]

    def _turn_until(self, is_done: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Handle events until `is_done` or until the time limit."""
        until = time.monotonic() + limit_s
        while not is_done() and (left_s := until - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(TURN_S, left_s)):
                key.data()
            self._reap()
            status = self._rank_status
            if status is not None and (status != 0 or self._is_terminating):
                self._tear_down(0)

    def _reap(self) -> None:
        for pid in list(self._children):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._children.pop(pid)(status)

    def _note_rank(self, status: int) -> None:
        self._rank_status = status

    def _note_launcher(self, status: int) -> None:
        self._over = _code(status)
        if self._over != 0:
            message = f"`{self._launch.real}` {'was killed' if os.WIFSIGNALED(status) else 'ended'}"
            sys.stderr.write(f"shoal: {message} with code {self._over}\n")

    def _announce_end(self) -> None:
        """Tell the other nodes that the world is over. Runs on the first node."""
        if self._world.node == 0:
            for channel in self._peers.values():
                with contextlib.suppress(OSError):
                    channel.send({"over": self._over})

    def _tear_down(self, code: int) -> None:
        """End all processes of the world on this node, and this process. The code of a failed rank goes
        before the launcher's code.
        """
        for door in self._ranks.values():
            with contextlib.suppress(OSError):
                mpi_rank.send(door, {"code": code or 1})
        for pid, note in self._children.items():
            if note != self._note_rank:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        if self._rank_status:
            end_as(self._rank_status)
        os._exit(code)


def _become_daemon(command: list[str], environment: dict[str, str]) -> None:
    """Become a daemon in a newly forked process. Never returns."""
    try:
        os.setpgid(0, 0)
        for number in (*PASSED_ON, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir("/")
        os.execvpe(command[0], command, environment)  # noqa: S606
    except OSError as error:
        sys.stderr.write(f"shoal: cannot start `{command[0]}`: {error.strerror}\n")
    finally:
        os._exit(NOT_STARTED)


def _ignore_signal(number: int, frame: object) -> None:
    """Do nothing, because the wake-up descriptor has already woken the loop."""


def die_with_host() -> None:
    """Make the first rank die with its host, because without the host there is no world."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _peer_of(door: socket.socket) -> int:
    return int.from_bytes(door.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)


def _tell(channel: Channel, number: int, status: int) -> None:
    """Report to the first node how the daemon that it had requested ended."""
    with contextlib.suppress(OSError):
        channel.send({"status": status, "id": number})


def _answer(door: socket.socket, status: int) -> None:
    """Report to an agent how its daemon ended, if the agent is still connected."""
    with contextlib.suppress(OSError):
        mpi_rank.send(door, {"status": _code(status)})
    door.close()


def _code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code
