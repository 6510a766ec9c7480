"""Compare the process groups that a program forms with the ranks that Shoal started for it.

Each process of a rank that forms a group appends one line to a file beside the stand-ins (the start hook does
it). The job owns the file, so it is read up to a limit, and malformed lines are skipped. A job that writes
false lines deceives only itself.

`UnknownLaunchers` finds launchers that run inside ranks without Shoal's consent. The start hook replaces a
launcher by its stand-in. If the hook could not run, because a program was started with an empty environment,
the launcher starts processes of its own, which know of no other rank. The same holds for `mpirun` if a script
names it by its path and has changed the variables that keep MPI from starting. It looks at the processes once
in `LOOK_S`, so it may miss a launcher that ends sooner than that.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from shoal import bounded_file
from shoal.clock import Clock
from shoal.runtime.confine.confinement import Confinement
from shoal.runtime.process.log import LogFile
from shoal.runtime.supervisor.endings import Ending
from shoal.runtime.supervisor.unfinished_launchers import UNFINISHED_LAUNCHER, rank_with_unfinished_launcher
from shoal.runtime.warm import launchers, mpirun
from shoal.wire import EndKind, TaskRanks, TaskSpec, World

MAX_PROCESSES = 1000
"""Limit for one look, which costs some 10 us for each process. The next look goes on with the others."""
MAX_COMMAND_LINE = 64 << 10
MAX_ENVIRONMENT = 1 << 20
SEEN_S = 0.5
"""A launcher in Python looks like the real one until its interpreter has started and becomes the stand-in."""
MPI = {name.partition(".")[0] for name in mpirun.NAMES}
MARK, MPI_MARK = f"{launchers.MARK}=".encode(), f"{mpirun.WORLD}=".encode()
"""A launcher that Shoal lets run has the first in its environment, and a process of an MPI world the second.
An `mpirun` needs the second: in a job of several ranks, Shoal starts it only to make the job's own world.
"""


class UnknownLaunchers:
    """The launchers among one node's processes. `launcher_name` is the name of one that was seen, or None."""

    def __init__(self) -> None:
        self.launcher_name: str | None = None
        self._last = 0
        self._others: dict[int, int] = {}
        """Hashes of command lines that are no launcher's. A process may get another one later, by `exec`."""
        self._seen_at: dict[int, float] = {}

    def check(self, pids: Iterable[int], now: float) -> None:
        """Look for launchers. A process that cannot be read is none."""
        living = set(pids)
        self._others = {pid: seen for pid, seen in self._others.items() if pid in living}
        self._seen_at = {pid: at for pid, at in self._seen_at.items() if pid in living}
        for pid in self._next(living):
            line = _read(pid, "cmdline", MAX_COMMAND_LINE)
            if not line or hash(line) == self._others.get(pid):
                continue
            name = _launcher(pid, line)
            if name is None:
                self._others[pid] = hash(line)
                self._seen_at.pop(pid, None)
            elif name in MPI or now - self._seen_at.setdefault(pid, now) >= SEEN_S:
                self.launcher_name = name

    def _next(self, living: set[int]) -> list[int]:
        """Return the processes for one look, those first that the last looks did not reach."""
        chosen = sorted(living, key=lambda pid: (pid <= self._last, pid))[:MAX_PROCESSES]
        self._last = chosen[-1] if len(living) > MAX_PROCESSES else 0
        return chosen


def _launcher(pid: int, line: bytes) -> str | None:
    """Return the launcher with this command line. None: it is none, or Shoal lets it run."""
    arguments = line.decode(errors="replace").split("\0")[:-1]
    name, arguments = _launcher_name(arguments)
    if name is None or not arguments or arguments[0] in launchers.QUERIES:
        return None
    marks = (MPI_MARK,) if name in MPI else (MARK, MPI_MARK)
    variables = _read(pid, "environ", MAX_ENVIRONMENT).split(b"\0")
    return None if any(variable.startswith(marks) for variable in variables) else name


def _launcher_name(command_line: list[str]) -> tuple[str | None, list[str]]:
    program = command_line[0].rpartition("/")[2] if command_line else ""
    if program.startswith("python"):
        return launchers.recognize("python", command_line[1:])
    name = program.partition(".")[0]
    return (name if name in MPI else None), command_line[1:]


def _read(pid: int, name: str, most: int) -> bytes:
    """Read a file of the process, empty if it has ended."""
    with contextlib.suppress(OSError):
        return bounded_file.read_start(f"/proc/{pid}/{name}", most)
    return b""


MAX_REPORTS_BYTES = 1 << 20
"""Limit for one attempt on one node: 16 lines of some 40 bytes for each process."""
MAX_WORLD = 1 << 24
LOOK_S = 1.0
PATIENCE_S = 60.0
"""How long groups that are too small may stand before the attempt ends for them. Some programs first test
themselves in a small group.
"""

TWO_PROGRAMS = (
    "rank {rank} started a launcher or a program while another one was still running there: both would have "
    "one number among the ranks; start one after the other, or submit each as a job of its own "
    "(`shoal run --array`)"
)
REFUSED = (
    "{rank} started a launcher that was refused, and the script passed over it; `shoal logs` of the job "
    "says why and what to write"
)
REFUSALS = (launchers.SECOND, launchers.REFUSED)
LOST = int(launchers.LOST)


class ProcessGroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """A process reports that it is a member of a group."""

    shoal_rank: int
    rendezvous_round: int
    size: int
    group_rank: int
    formed: str
    """Which of the groups that its process formed, in order."""
    library: str


class WorldCheck:
    """The reports of one node's ranks. Main thread only."""

    def __init__(
        self, task_spec: TaskSpec, folder: str, confinement: Confinement, clock: Clock, log: LogFile
    ) -> None:
        self._task_spec = task_spec
        self._folder = folder
        self._path = os.path.join(folder, launchers.WORLDS)
        self._uid = os.geteuid() if confinement.uid is None else confinement.uid
        self._confinement = confinement
        self._launchers = UnknownLaunchers()
        self._clock = clock
        self._log = log
        self._num_read = 0
        self._rest = b""
        self._reports: list[ProcessGroupReport] = []
        self._split_since: float | None = None
        self._next_at = 0.0
        # The ranks of a replica answer requests, and need not know of each other.
        self._is_service = task_spec.program.probe is not None
        self._is_checked = task_spec.ranks.world_size > 1 and not self._is_service
        self.world: World | None = None
        """The best group that the current ranks have formed; None: they reported none."""

    def check(self, rendezvous_round: int) -> Ending | None:
        """Read new reports. Return the group's ending if its process groups do not span the job, and have
        stood so long that no larger one will follow.
        """
        now = self._clock.monotonic()
        if not self._is_checked or now < self._next_at:
            return None
        self._next_at = now + LOOK_S
        self._launchers.check(self._confinement.processes(), now)
        end = self._verdict(rendezvous_round)
        if end is not None and self._refusal(launchers.SECOND, rendezvous_round) is not None:
            return end
        ranks = {report.shoal_rank for report in self._reports if report.rendezvous_round == rendezvous_round}
        if end is None or (ranks and len(ranks) < self._task_spec.ranks.ranks_per_node):
            self._split_since = None
            return None
        if self._split_since is None:
            self._split_since = now
            self._log.add_message(f"{end.message}; if that is so for {PATIENCE_S:.0f} s, the job fails")
        return end if now >= self._split_since + PATIENCE_S else None

    def judge(self, end: Ending, rendezvous_round: int) -> Ending:
        """Return the same ending, or `SPLIT_WORLD` if ranks ended well without working together."""
        split = None if self._is_service else self._verdict(rendezvous_round)
        if split is None:
            return end
        if end.kind is EndKind.SUCCEEDED:
            return split
        is_told = (
            self._refusal(launchers.REFUSED, rendezvous_round) is not None
        )  # in the last lines of the rank
        if end.kind in (EndKind.EXITED, EndKind.SIGNALED) and not is_told:
            return msgspec.structs.replace(end, message=f"{end.message}; {split.message}")
        return end

    def unfinished_launcher(self, rendezvous_round: int, wait: Callable[[float], object]) -> Ending | None:
        """Return `SPLIT_WORLD` if `run` has ended in a rank before the launcher that it started."""
        if self._is_service or self._task_spec.ranks.may_split_world:
            return None
        rank = rank_with_unfinished_launcher(self._folder, rendezvous_round, self._clock, wait)
        if rank is None:
            return None
        message = UNFINISHED_LAUNCHER.format(rank=rank)
        return Ending(kind=EndKind.SPLIT_WORLD, message=message, grace_s=self._task_spec.resources.grace_s)

    def _verdict(self, rendezvous_round: int) -> Ending | None:
        self._read_reports()
        if self._is_checked:
            self.world = best_world(self._last_groups(rendezvous_round), self._task_spec.ranks)
        problem = None if self._task_spec.ranks.may_split_world else self._problem(rendezvous_round)
        if problem is None:
            return None
        return Ending(kind=EndKind.SPLIT_WORLD, message=problem, grace_s=self._task_spec.resources.grace_s)

    def _problem(self, rendezvous_round: int) -> str | None:
        second = self._refusal(launchers.SECOND, rendezvous_round)
        if second is not None:
            return TWO_PROGRAMS.format(rank=second.shoal_rank)
        is_whole = self.world is not None and self.world.is_whole
        if is_whole or (not self._is_checked and self._groups(rendezvous_round)):
            return None
        refused = self._refusal(launchers.REFUSED, rendezvous_round)
        if refused is not None:
            rank = "a rank" if refused.shoal_rank == LOST else f"rank {refused.shoal_rank}"
            return REFUSED.format(rank=rank)
        # If the limit was reached, a group that spans the job may have been reported without being read.
        is_known = self.world is not None and self._num_read < MAX_REPORTS_BYTES
        if not self._is_checked or not (is_known or self._launchers.launcher_name is not None):
            return None
        return describe_split_world(
            self.world, self._task_spec.ranks.world_size, self._launchers.launcher_name
        )

    def _groups(self, rendezvous_round: int) -> list[ProcessGroupReport]:
        return [
            report
            for report in self._reports
            if report.rendezvous_round == rendezvous_round and report.library not in REFUSALS
        ]

    def _last_groups(self, rendezvous_round: int) -> list[ProcessGroupReport]:
        """Return the reports that tell whether the ranks work together.

        These are all reports, unless every rank of this node formed its last group behind a launcher that is
        not Shoal's. In that case a check of the network, which spans the job, may come before a training that
        does not. Groups that a program forms later by itself, for example for an evaluation in each rank, are
        meant so.
        """
        groups = self._groups(rendezvous_round)
        last = {report.shoal_rank: report.library for report in groups}
        if set(last.values()) == {launchers.LAUNCHED} and len(last) == self._task_spec.ranks.ranks_per_node:
            return [report for report in groups if report.library == launchers.LAUNCHED]
        return groups

    def _refusal(self, report: str, rendezvous_round: int) -> ProcessGroupReport | None:
        """Return the first report about a launcher that was refused in this way."""
        refusals = (line for line in self._reports if line.library == report)
        rounds = (rendezvous_round, LOST)
        return next((line for line in refusals if line.rendezvous_round in rounds), None)

    def _read_reports(self) -> None:
        if self._num_read >= MAX_REPORTS_BYTES:
            return
        with contextlib.suppress(OSError):  # the program may have removed the file
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                facts = os.fstat(fd)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == self._uid:
                    self._add_lines(os.pread(fd, MAX_REPORTS_BYTES - self._num_read, self._num_read))
            finally:
                os.close(fd)

    def _add_lines(self, data: bytes) -> None:
        self._num_read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._reports += [report for line in lines if (report := _parse_report(line)) is not None]


def best_world(reports: Sequence[ProcessGroupReport], ranks: TaskRanks) -> World | None:
    """Return the largest group in these reports. A group that spans the job comes first.

    A group with enough members may still be one of several: if all of its members are processes of one rank,
    or of one of several nodes, it misses the others.
    """
    on_node: dict[tuple[int, str], set[int]] = defaultdict(set)
    of_rank: dict[tuple[int, str, int], set[int]] = defaultdict(set)
    for report in reports:
        on_node[report.size, report.formed].add(report.group_rank)
        of_rank[report.size, report.formed, report.shoal_rank].add(report.group_rank)
    alone = {(size, formed) for (size, formed, _), members in of_rank.items() if len(members) >= size}
    worlds = [
        World(
            size=size,
            ranks=ranks.world_size,
            is_whole=size >= ranks.world_size
            and (size, formed) not in alone
            and (len(ranks.nodes) == 1 or len(members) < size),
        )
        for (size, formed), members in on_node.items()
    ]
    return max(worlds, key=lambda report: (report.is_whole, report.size), default=None)


def describe_split_world(world: World | None, ranks: int, launcher: str | None) -> str:
    """Say that a job's ranks did not work together, and what to write."""
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


def _parse_report(line: bytes) -> ProcessGroupReport | None:
    fields = line.decode(errors="replace").split()
    try:
        shoal_rank, rendezvous_round, size, group_rank = map(int, fields[:4])
        formed, library = fields[4:]
    except ValueError:
        return None
    if not (0 < size <= MAX_WORLD and 0 <= group_rank < size):
        return None
    return ProcessGroupReport(
        shoal_rank=shoal_rank,
        rendezvous_round=rendezvous_round,
        size=size,
        group_rank=group_rank,
        formed=formed[:32],
        library=library[:32],
    )
