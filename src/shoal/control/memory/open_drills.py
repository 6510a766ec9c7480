"""Drills that are under way, and the reports of supervisors by which they are judged.

In memory, because the event log has what was asked, and a supervisor repeats what it did with every renewal.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from shoal.control.memory.attempt_table import AttemptMemories
from shoal.model.attempt import Attempt
from shoal.model.drill import Drill, drill_command_for
from shoal.wire import ActivitySigns, DrillAct, DrillCommand, DrillResult, Progress, Renewal


class OpenDrill:
    """One drill that has no result yet."""

    def __init__(self, drill: Drill, *, is_from_before: bool = False) -> None:
        self.drill = drill
        self.is_inherited = is_from_before
        """Whether an earlier control plane started the drill."""
        self.acts: dict[str, list[DrillResult]] = {}
        """By node."""
        self.noticed_at: float | None = None
        self.seen_at: float | None = None
        """Time of the newest step that was reported. For several jobs, the time of the job whose newest step
        is oldest.
        """
        self.asked_at: float | None = None
        """When supervisors were last asked how far they are."""

    @property
    def done(self) -> tuple[DrillResult, ...]:
        """The acts that were done, in order."""
        results = (result for acts in self.acts.values() for result in acts)
        return tuple(sorted(results, key=lambda result: result.at))

    def command_for(self, node: str) -> DrillCommand | None:
        command = drill_command_for(self.drill, node, self.done)
        if command is None or any(result.act is command.act for result in self.acts.get(node, ())):
            return None
        return command

    def note_act(self, node: str, act_result: DrillResult) -> bool:
        """Note what a supervisor did. Return whether that was new."""
        acts = self.acts.setdefault(node, [])
        is_new = all(result.act is not act_result.act for result in acts)
        if is_new:
            acts.append(act_result)
        return is_new


class OpenDrills:
    """Used on the event loop alone."""

    def __init__(self, attempts: AttemptMemories) -> None:
        self._attempts = attempts
        self.by_id: dict[str, OpenDrill] = {}
        self.opened_at: float | None = None
        """When the open drills were read from the log. None: they still have to be read."""
        self.newest: dict[str, str] = {}
        """By drill: the newest attempt of its job."""

    @property
    def attempt_ids(self) -> set[str]:
        """Attempts by which drills under way are judged, also after they have ended."""
        return {open_drill.drill.attempt_id for open_drill in self.by_id.values()}

    def of_job(self, job_id: str) -> OpenDrill | None:
        return next(
            (open_drill for open_drill in self.by_id.values() if open_drill.drill.job_id == job_id), None
        )

    def note_renewal(self, renewal: Renewal, now: float) -> bool:
        """Note the drill facts of a renewal. Return whether other supervisors may have
        something to do now.
        """
        memory, node = self._attempts.of(renewal.attempt_id), renewal.node
        memory.first_renewal_at.setdefault(node, now)
        memory.rounds[node] = renewal.rendezvous_round
        if renewal.progress is not None:
            memory.progress[node] = renewal.progress
        if renewal.signs is not None:
            memory.signs[node] = renewal.signs
        act_result = renewal.drill_result
        open_drill = self.by_id.get(act_result.drill_id) if act_result is not None else None
        return (
            open_drill is not None
            and act_result is not None
            and open_drill.note_act(renewal.node, act_result)
        )

    def command_for(self, attempt: Attempt, node: str) -> DrillCommand | None:
        """Return what the supervisor of this node has to do for a drill now. Ranks of a later group are not
        harmed.
        """
        for open_drill in self.by_id.values():
            is_its = open_drill.drill.attempt_id == attempt.attempt_id
            command = open_drill.command_for(node) if is_its else None
            if command is not None and self._is_meant(open_drill.drill, command, attempt, node):
                return command
        return None

    def _is_meant(self, drill: Drill, command: DrillCommand, attempt: Attempt, node: str) -> bool:
        """Whether the ranks are still the group that the drill is about."""
        if command.act is not DrillAct.KILL_RANKS:
            return attempt.rendezvous_round == drill.rendezvous_round
        # If the ranks of another node were killed first, the next group is asked for before this node hears
        # of the drill.
        is_same_task = attempt.replacement_on(node) <= drill.rendezvous_round
        return is_same_task and self.rendezvous_round(attempt.attempt_id, node) == drill.rendezvous_round

    def close(self, drill_id: str) -> None:
        self.by_id.pop(drill_id, None)
        self.newest.pop(drill_id, None)

    def progress(self, attempt_id: str, nodes: Iterable[str]) -> tuple[Progress, ...]:
        """Return the newest progress of each of these nodes that has reported any."""
        newest = map(self._attempts.get(attempt_id).progress.get, nodes)
        return tuple(report for report in newest if report is not None)

    def signs(self, attempt: Attempt) -> tuple[ActivitySigns, ...]:
        """Return the signs of activity of the attempt's newest rank group; empty until every node has
        reported its own.
        """
        signs_by_node = self._attempts.get(attempt.attempt_id).signs
        reported = [signs_by_node.get(node) for node in attempt.node_names]
        complete = tuple(
            signs
            for signs in reported
            if signs is not None and signs.rendezvous_round == attempt.rendezvous_round
        )
        return complete if len(complete) == len(reported) else ()

    def rendezvous_round(self, attempt_id: str, node: str) -> int:
        """Return the rendezvous round that the node last reported; -1 if it has reported none."""
        return self._attempts.get(attempt_id).rounds.get(node, -1)

    def first_renewal_at(self, attempt_id: str, node: str) -> float | None:
        """When this control plane first heard from the node."""
        return self._attempts.get(attempt_id).first_renewal_at.get(node)


def to_milliseconds(number: float | None) -> float | None:
    """Round to milliseconds. Finer differences were never measured."""
    return None if number is None else round(number, 3)


def drill_facts(drill: Drill) -> dict[str, object]:
    """Return the drill as the event log keeps it."""
    facts: dict[str, object] = msgspec.to_builtins(drill)
    return facts
