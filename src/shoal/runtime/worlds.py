"""Compare the process groups that a program forms with the ranks that Shoal started for it.

Each process of a rank that forms a group appends one line to a file beside the stand-ins (`warm/hook.py`).
The file is the job's: it is read up to a limit, and a line that makes no sense is passed over. A job that
writes false lines deceives itself alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec

from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.cut_off import CUT_OFF, rank_at_work
from shoal.runtime.ending import Ending
from shoal.runtime.logs import LogFile
from shoal.runtime.own_launchers import OwnLaunchers
from shoal.runtime.warm import names
from shoal.wire import EndKind, Order, World

MAX_BYTES = 1 << 20
"""Of one attempt on one node: 16 lines of each process, and some 40 bytes in each of them."""
MAX_WORLD = 1 << 24
LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long groups that are too small may stand before the attempt is ended for them. Some programs test
themselves in a small group first."""

TWO_PROGRAMS = (
    "rank {rank} started a launcher or a program while another one was still running there: both would have "
    "one number among the ranks; start one after the other, or submit each as a job of its own "
    "(`shoal run --array`)"
)
REFUSED = (
    "rank {rank} started a launcher that was refused, and the script passed over it; `shoal logs` of the job "
    "says why and what to write"
)
REFUSALS = (names.SECOND, names.REFUSED)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One process is a member of one group."""

    shoal_rank: int
    generation: int
    world: int
    member: int
    formed: str
    """Which of the groups that its process forms one after the other."""
    library: str


class Worlds:
    """What the ranks of one node have reported. Main thread only."""

    def __init__(
        self, order: Order, folder: str, confinement: Confinement, clock: Clock, log: LogFile
    ) -> None:
        self._order = order
        self._folder = folder
        self._path = os.path.join(folder, names.WORLDS)
        self._uid = os.geteuid() if confinement.uid is None else confinement.uid
        self._confinement = confinement
        self._launchers = OwnLaunchers()
        self._clock = clock
        self._log = log
        self._read = 0
        self._rest = b""
        self._reports: list[Report] = []
        self._split_since: float | None = None
        self._next_at = 0.0
        # A replica of a service answers requests: its ranks need not know of each other.
        self._is_service = order.probe is not None
        self._is_checked = order.world_size > 1 and not self._is_service
        self.world: World | None = None
        """The best group that the ranks which run now have formed; None: they have told of none."""

    def look(self, generation: int) -> Ending | None:
        """Read what has been reported lately. How the group of ranks ends, if it must: its process groups do
        not span the job, and have stood for so long that nothing larger will follow.
        """
        now = self._clock.monotonic()
        if not self._is_checked or now < self._next_at:
            return None
        self._next_at = now + LOOK_S
        self._launchers.look(self._confinement.processes(), now)
        end = self._verdict(generation)
        if end is not None and self._refusal(names.SECOND, generation) is not None:
            return end
        ranks = {one.shoal_rank for one in self._reports if one.generation == generation}
        if end is None or (ranks and len(ranks) < self._order.ranks_per_node):
            self._split_since = None
            return None
        if self._split_since is None:
            self._split_since = now
            self._log.say(f"{end.message}; if that is so for {PATIENCE_S:.0f} s, the job fails")
        return end if now >= self._split_since + PATIENCE_S else None

    def judged(self, end: Ending, generation: int) -> Ending:
        """The same ending, or `SPLIT_WORLD` where ranks ended well without working together."""
        split = None if self._is_service else self._verdict(generation)
        if split is None:
            return end
        if end.kind is EndKind.SUCCEEDED:
            return split
        is_told = self._refusal(names.REFUSED, generation) is not None  # in the last lines of the rank
        if end.kind in (EndKind.EXITED, EndKind.SIGNALED) and not is_told:
            return msgspec.structs.replace(end, message=f"{end.message}; {split.message}")
        return end

    def cut_off(self, generation: int, wait: Callable[[float], object]) -> Ending | None:
        """`SPLIT_WORLD` if `run` has ended in a rank before the launcher that it started there."""
        if self._is_service or self._order.may_split_world:
            return None
        rank = rank_at_work(self._folder, generation, self._clock, wait)
        if rank is None:
            return None
        message = CUT_OFF.format(rank=rank)
        return Ending(kind=EndKind.SPLIT_WORLD, message=message, grace_s=self._order.grace_s)

    def _verdict(self, generation: int) -> Ending | None:
        self._hear()
        if self._is_checked:
            self.world = best_of(self._last_groups(generation), self._order)
        problem = None if self._order.may_split_world else self._problem(generation)
        if problem is None:
            return None
        return Ending(kind=EndKind.SPLIT_WORLD, message=problem, grace_s=self._order.grace_s)

    def _problem(self, generation: int) -> str | None:
        second = self._refusal(names.SECOND, generation)
        if second is not None:
            return TWO_PROGRAMS.format(rank=second.shoal_rank)
        is_whole = self.world is not None and self.world.is_whole
        if is_whole or (not self._is_checked and self._groups(generation)):
            return None
        refused = self._refusal(names.REFUSED, generation)
        if refused is not None:
            return REFUSED.format(rank=refused.shoal_rank)
        # Beyond the limit a group that spans the job may have been reported, and was not read.
        is_known = self.world is not None and self._read < MAX_BYTES
        if not self._is_checked or not (is_known or self._launchers.found is not None):
            return None
        return describe(self.world, self._order.world_size, self._launchers.found)

    def _groups(self, generation: int) -> list[Report]:
        return [one for one in self._reports if one.generation == generation and one.library not in REFUSALS]

    def _last_groups(self, generation: int) -> list[Report]:
        """The groups that tell whether the ranks work together: all of them, unless every rank of this node
        has formed its last one behind a launcher that is not Shoal's. Then a check of the network, which
        spans the job, may come before a training that does not. Groups that a program forms later by itself,
        as for an evaluation in each rank, are meant so.
        """
        groups = self._groups(generation)
        last = {one.shoal_rank: one.library for one in groups}
        if set(last.values()) == {names.LAUNCHED} and len(last) == self._order.ranks_per_node:
            return [one for one in groups if one.library == names.LAUNCHED]
        return groups

    def _refusal(self, report: str, generation: int) -> Report | None:
        """The first rank that has told of a launcher that was refused so."""
        told = (one for one in self._reports if one.library == report)
        return next((one for one in told if one.generation == generation), None)

    def _hear(self) -> None:
        if self._read >= MAX_BYTES:
            return
        with contextlib.suppress(OSError):  # the program may have removed it
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(fd)
                if stat.S_ISREG(found.st_mode) and found.st_uid == self._uid:
                    self._take(os.pread(fd, MAX_BYTES - self._read, self._read))
            finally:
                os.close(fd)

    def _take(self, data: bytes) -> None:
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._reports += [report for line in lines if (report := _parsed(line)) is not None]


def best_of(reports: Sequence[Report], order: Order) -> World | None:
    """The largest of the groups in these reports, one that spans the job before all others.

    One that has enough members may still be one of several: if all of its members are processes of one rank,
    or of one node of several, it misses the others.
    """
    on_node: dict[tuple[int, str], set[int]] = defaultdict(set)
    of_rank: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    for one in reports:
        on_node[one.world, one.formed].add(one.member)
        of_rank[one.world, one.formed, one.shoal_rank].add(one.member)
    alone = {(size, formed) for (size, formed, _), members in of_rank.items() if len(members) >= size}
    worlds = [
        World(
            size=size,
            ranks=order.world_size,
            is_whole=size >= order.world_size
            and (size, formed) not in alone
            and (len(order.nodes) == 1 or len(members) < size),
        )
        for (size, formed), members in on_node.items()
    ]
    return max(worlds, key=lambda one: (one.is_whole, one.size), default=None)


def describe(world: World | None, ranks: int, launcher: str | None) -> str:
    """That a job's ranks did not work together, and what to write."""
    seen = []
    if launcher is not None:
        seen.append(f"`{launcher}` started processes of its own inside of a rank")
    if world is not None:
        members = "1 member" if world.size == 1 else f"{world.size} members"
        seen.append(f"the largest process group that they formed has {members} and does not span the job")
    else:
        seen.append("no process group of theirs was seen")
    return (
        f"the {ranks} ranks of the job did not work together: {', and '.join(seen)}; start the program with "
        "`python` or a launcher as found on PATH, keep PYTHONPATH as it is there, or allow separate groups "
        "with `world: any`"
    )


def _parsed(line: bytes) -> Report | None:
    words = line.decode(errors="replace").split()
    try:
        shoal_rank, generation, world, member = map(int, words[:4])
        formed, library = words[4:]
    except ValueError:
        return None
    if not (0 < world <= MAX_WORLD and 0 <= member < world):
        return None
    return Report(
        shoal_rank=shoal_rank,
        generation=generation,
        world=world,
        member=member,
        formed=formed[:32],
        library=library[:32],
    )
