"""What a node's ranks look like when nothing moves, and who among them holds up the others."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from shoal.runtime import stacks, tree
from shoal.runtime.board import Beat, Board
from shoal.runtime.ending import Hang
from shoal.runtime.watch import Process


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """One look at all ranks of a node."""

    step: int
    """The lowest step that was complete."""
    stacks: tuple[tuple[Process, stacks.Stacks], ...]
    stopped: frozenset[int]
    """Processes that somebody stopped with a signal."""
    culprits: tuple[Process, ...]
    """Those who do not wait for others while others do; everybody, where it does not show."""
    is_elsewhere: bool
    """No rank here is seen to do anything but wait: it may be for one of another node."""
    is_saving: bool = False
    """One of them waits for a checkpoint under way, which takes as long as the storage does."""

    def hang(self, told: str) -> Hang:
        """Who is named for it: the first of the culprits."""
        first = self.culprits[0]
        place = next(found.place for process, found in self.stacks if process is first)
        return Hang(told=told, rank=first.rank, place=place)


def look(
    ranks: Sequence[Process], board: Board, board_fd: int, found: set[int], path: str, *, is_inside: bool
) -> Scene:
    """Take the stacks of all ranks. `found`: every process of the share; `path`: where programs are found;
    `is_inside`: ranks have a namespace of their own, and number processes as we do not.
    """
    beats = {process.slot: board.beat(process.slot) for process in ranks}
    stopped = tree.stopped(found)
    pids = stacks.own_pids((beat.pid for beat in beats.values()), found, is_inside=is_inside)
    subjects = [
        stacks.Subject(
            pid=pids[beat.pid], slot=slot, can_answer=beat.can_answer and pids[beat.pid] not in stopped
        )
        for slot, beat in beats.items()
        if beat.pid in pids
    ]
    taken = stacks.taken(subjects, stacks.spy_program(path), board_fd)
    unseen = stacks.Stacks(text="no stacks: its process is not to be found")
    known = tuple((process, taken.get(process.slot, unseen)) for process in ranks)
    # What a rank has started may be stopped, or traced, for its own reasons.
    motionless = tuple(process for process in ranks if pids.get(beats[process.slot].pid) in stopped)
    return Scene(
        step=min(beat.step for beat in beats.values()),
        stacks=known,
        stopped=frozenset(stopped),
        culprits=motionless or _culprits(known, beats),
        is_elsewhere=not motionless and all(one.is_waiting or not one.place for _, one in known),
        is_saving=any(one.is_saving for _, one in known),
    )


def halted(ranks: Sequence[Process], board: Board, found: set[int], *, is_inside: bool) -> frozenset[int]:
    """The slots of ranks that somebody stopped with a signal, at one cheap look. What a rank has started may
    be stopped for its own reasons.
    """
    stopped = tree.halted(found)
    if not stopped:
        return frozenset()
    beats = {process.slot: board.beat(process.slot) for process in ranks}
    pids = stacks.own_pids((beat.pid for beat in beats.values()), stopped, is_inside=is_inside)
    return frozenset(slot for slot, beat in beats.items() if beat.pid in pids)


def _culprits(known: Sequence[tuple[Process, stacks.Stacks]], beats: dict[int, Beat]) -> tuple[Process, ...]:
    """Oldest sign of life first. Without stacks of all of them nobody is accused: all are ended."""
    busy = [process for process, one in known if one.place and not one.is_waiting]
    is_clear = all(one.place for _, one in known) and 0 < len(busy) < len(known)
    suspects = busy if is_clear else [process for process, _ in known]
    return tuple(sorted(suspects, key=lambda process: (beats[process.slot].step, beats[process.slot].at_ns)))
