"""A rank that bears witness: `python witness_rank.py FOLDER [SECONDS] [--talk] [--brief] [--stuck]`.

What it writes down lies on a disk that all nodes share. Two locks tell what no clock could: one of this rank
of the job, whoever runs it, and one of this rank of the attempt, at which every other attempt looks. They are
held for as long as the process lives, however it ends, or a child that it has, as launchers have: whoever is
to end a rank has to end that, too. Runs for so many seconds, or until it is let go
(`SoakWitness.let_go`); with `--brief`, in an attempt that is not the job's first, not at all. With `--stuck`
or
`--stuck-thread` it, or another thread of it, asks a disk for something that may never answer (`deaf_disk`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

BEAT_S = 0.1


class WitnessRank:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job = os.environ["SHOAL_JOB_ID"]
        self._attempt = os.environ["SHOAL_ATTEMPT_ID"]
        self._rank = os.environ["SHOAL_RANK"]
        self._file = (folder / f"{self._job}.{self._rank}.told").open("a", buffering=1)

    def record(self, event: str) -> None:
        """One line in one write: what, attempt, generation, node, and when on the kernel's clock."""
        generation, node = os.environ["SHOAL_RENDEZVOUS_ROUND"], os.environ["SHOAL_NODE"]
        at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._file.write(f"{event} {self._attempt} {generation} {node} {at:.3f}\n")

    def take_locks(self) -> bool:
        """Whether nobody else runs as this rank, and nobody at all in another attempt of the job."""
        for name in (f"{self._rank}.lock", f"{self._rank}.{self._attempt}.held"):
            held = os.open(self._folder / f"{self._job}.{name}", os.O_RDWR | os.O_CREAT, 0o600)
            if not _is_locked(held):
                return False
        # Ours is held by now: of two that begin at once at least one sees the other.
        for path in self._folder.glob(f"{self._job}.*.held"):
            if path.name.split(".")[-2] != self._attempt:
                other = os.open(path, os.O_RDWR)
                is_free = _is_locked(other)
                os.close(other)
                if not is_free:
                    return False
        return True

    def touch_hung_disk(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / "deaf" / f"{self._job}.{self._rank}").stat()

    def is_first_attempt(self) -> bool:
        """Whether no other attempt has begun before."""
        told = (self._folder / f"{self._job}.{self._rank}.told").read_text().splitlines()
        return {line.split()[1] for line in told} <= {self._attempt}

    def is_released(self) -> bool:
        return (self._folder / f"{self._job}.open").exists()


def fork_child() -> None:
    """One that does nothing, but has our locks, in a session of its own. It hears no request to stop."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()


def _is_locked(fd: int) -> bool:
    """Whether the lock is ours now."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def echo_to_peers() -> None:
    """As rank 0: send back whatever comes, to whoever comes."""
    listener = socket.create_server(("", int(os.environ["SHOAL_MASTER_PORT"])))
    while True:
        peer, _ = listener.accept()
        threading.Thread(target=_echo, args=(peer,), daemon=True).start()


def _echo(peer: socket.socket) -> None:
    with contextlib.suppress(OSError), peer:
        while said := peer.recv(1):
            peer.sendall(said)


def _connect_to_rank_zero() -> socket.socket:
    """A connection to rank 0, once that is there."""
    address = os.environ["SHOAL_MASTER_ADDR"], int(os.environ["SHOAL_MASTER_PORT"])
    while True:
        with contextlib.suppress(OSError):
            return socket.create_connection(address, timeout=None)
        time.sleep(BEAT_S)


def talk_to_rank_zero(rank: WitnessRank) -> None:
    """As any other rank: have a byte go to rank 0 and back, over one connection, again and again."""
    with _connect_to_rank_zero() as first:
        while True:
            first.sendall(b"?")
            if not first.recv(1):
                rank.record("deserted")
                return
            rank.record("heard")
            time.sleep(BEAT_S)


def main(folder: str, seconds: str = "inf", *options: str) -> int:
    rank = WitnessRank(Path(folder))
    if not rank.take_locks():
        rank.record("overlap")
        return 3

    def stop(*_: object) -> None:
        rank.record("stop")
        os._exit(143)

    fork_child()
    signal.signal(signal.SIGTERM, stop)
    rank.record("start")
    if "--talk" in options:
        is_first = os.environ["SHOAL_RANK"] == "0"
        work = echo_to_peers if is_first else lambda: talk_to_rank_zero(rank)
        threading.Thread(target=work, daemon=True).start()
    if "--stuck-thread" in options:
        threading.Thread(target=rank.touch_hung_disk, daemon=True).start()
    if "--stuck" in options:
        rank.touch_hung_disk()
    is_over = "--brief" in options and not rank.is_first_attempt()
    deadline = time.monotonic() + (0.0 if is_over else float(seconds))
    while time.monotonic() < deadline and not rank.is_released():
        rank.record("beat")
        time.sleep(BEAT_S)
    rank.record("end")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
