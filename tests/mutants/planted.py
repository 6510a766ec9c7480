"""The list of planted bugs. `old` occurs exactly once in its file; a unit test holds that."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake that somebody could really make."""

    name: str
    file: str
    """Below `src/shoal`."""
    old: str
    new: str
    promise: str
    """What it breaks."""
    suites: tuple[str, ...]
    """Who should notice, the most likely first."""


MUTANTS = (
    Mutant(
        "watch_ignores_submissions_on_their_way",
        "control/watch.py",
        "being_submitted = frozenset(core.submitting)",
        "being_submitted: frozenset[str] = frozenset()",
        "P2: what is being handed over counts as running",
        ("sim",),
    ),
    Mutant(
        "fence_without_margin",
        "control/leases.py",
        "FENCE_MARGIN_S = 60.0",
        "FENCE_MARGIN_S = -20.0",
        "P3: replaced only when the supervisor has certainly stopped",
        ("control", "sim"),
    ),
    Mutant(
        "fence_forgets_late_submissions",
        "control/leases.py",
        "silent = self.silent_nodes(attempt, limit) if unsent_s > limit else ()",
        "silent = self.silent_nodes(attempt, limit)",
        "P3: the fence counts from the last moment something may have begun",
        ("sim",),
    ),
    Mutant(
        "orphans_are_fenced",
        "control/leases.py",
        "return tuple(node for node in silent if node not in attempt.orphaned_nodes)",
        "return silent",
        "P3: no fence passes where nobody is left to keep it",
        ("control",),
    ),
    Mutant(
        "fence_on_the_wall_clock",
        "control/leases.py",
        "        self._clock = clock\n",
        "        self._clock = type('Wall', (), {'monotonic': staticmethod(clock.now)})()\n",
        "P3: a clock that jumps moves no fence",
        ("sim",),
    ),
    Mutant(
        "unreachable_is_dead",
        "control/watch.py",
        "        if seen is None:\n",
        "        if seen is None or seen.sight is Sight.UNKNOWN:\n",
        "P3: silence is not death",
        ("sim",),
    ),
    Mutant(
        "launch_without_looking_again",
        "control/launch.py",
        " if own.state is AttemptState.STARTING]",
        "]",
        "P2: what was stopped meanwhile is not started",
        ("sim",),
    ),
    Mutant(
        "placed_on_a_stale_snapshot",
        "control/place.py",
        "        if attempt is None or attempt.state is not AttemptState.QUEUED:\n            continue\n",
        "        if attempt is None:\n            continue\n",
        "P2: a plan is checked against what is recorded now",
        ("sim",),
    ),
    Mutant(
        "stopped_job_is_tried_again",
        "model/retry.py",
        "if job.stop_asked_by is not None or attempt.reason is EndReason.CANCELLED:",
        "if attempt.reason is EndReason.CANCELLED:",
        "a person's stop is final",
        ("sim",),
    ),
    Mutant(
        "key_not_remembered",
        "control/once.py",
        "    tx.keys.remember(str(actor), key, asked, msgspec.json.encode(answer), now)\n",
        "",
        "P1: a repeated submission is the same job",
        ("sim",),
    ),
    Mutant(
        "first_end_ends_the_gang",
        "model/moves.py",
        "    if not noted.nodes_left:\n",
        "    if noted.outcomes:\n",
        "P2: an attempt is over when all its nodes are",
        ("sim",),
    ),
    Mutant(
        "stopping_holds_nothing",
        "model/attempt.py",
        "HOLDING = (AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING)",
        "HOLDING = (AttemptState.STARTING, AttemptState.RUNNING)",
        "nothing is given twice",
        ("sim",),
    ),
    Mutant(
        "stop_frees_at_once",
        "model/moves.py",
        "    (STARTING, StopAsked): _stop,\n",
        "    (STARTING, StopAsked): _stop_queued,\n",
        "P3: asking for an end is not evidence of it",
        ("sim",),
    ),
    Mutant(
        "gpus_counted_not_named",
        "scheduler/gpu_use.py",
        "self.unused = tuple(gpu for gpu in self.all if gpu.index not in self._used)",
        "self.unused = self.all[len(self._used) :]",
        "nothing is given twice",
        ("sim",),
    ),
    Mutant(
        "half_a_gang_starts",
        "scheduler/gang.py",
        "return found if len(found) >= demand.min_nodes else []",
        "return found",
        "a gang starts whole or not at all",
        ("sim",),
    ),
    Mutant(
        "array_limit_counts_only_the_past",
        "scheduler/book.py",
        "            self._num_of_array[holding.array_id] += 1\n",
        "            self._num_of_array[holding.array_id] += 0\n",
        "an array keeps its own limit",
        ("sim",),
    ),
    Mutant(
        "claim_not_exclusive",
        "runtime/spool.py",
        "    except FileExistsError:\n        return False\n",
        "    except FileExistsError:\n        return True\n",
        "P2: a share is run once",
        ("spool", "engine"),
    ),
    Mutant(
        "stale_claim_is_replaced",
        "runtime/spool.py",
        '    draft = f"{share.claimed}.new"\n',
        '    draft = f"{share.claimed}.new"\n    with contextlib.suppress(FileNotFoundError):\n'
        "        if not is_locked(share):\n            os.unlink(share.claimed)\n",
        "P2: a share is run once, also when whoever ran it is dead",
        ("spool", "engine", "supervisor"),
    ),
    Mutant(
        "lost_before_leftovers_are_killed",
        "engines/local/watch.py",
        "if not spool.kill_leftovers(view.share.directory, timeout_s=BURIAL_S):",
        "if spool.read_order(view.share) is None:",
        "P2: LOST is said when nothing runs any more",
        ("engine",),
    ),
    Mutant(
        "forgotten_attempt_starts_again",
        "engines/local/engine.py",
        "        if not views and self._book.is_kept(attempt_id):\n"
        "            return native_id(attempt_id)\n",
        "",
        "P2: submitting twice is one attempt, also after its end",
        ("engine",),
    ),
    Mutant(
        "outcome_before_the_tree_is_gone",
        "runtime/share.py",
        "        self._bury()\n        self._report(self._outcome(end))\n",
        "        self._report(self._outcome(end))\n        self._bury()\n",
        "P2: an outcome means that nothing runs any more",
        ("supervisor", "engine"),
    ),
    Mutant(
        "supervisor_outlives_its_fence",
        "runtime/reasons.py",
        "        if silent_s < self._order.fence_s:\n",
        "        if silent_s < 100 * self._order.fence_s:\n",
        "P3: a supervisor that cannot renew stops its ranks",
        ("supervisor",),
    ),
    Mutant(
        "strangers_are_believed",
        "runtime/http.py",
        "return answer if is_proven(credentials.proof_key, renewal, answer) else None",
        "return answer",
        "P3: only the control plane itself ends a lease",
        ("supervisor",),
    ),
    Mutant(
        "acknowledged_before_the_commit",
        "store/writer.py",
        "            seq = self._committer.commit()\n",
        "            _settle(taken, answers)\n            seq = self._committer.commit()\n",
        "P1: accepted means on disk",
        ("store",),
    ),
    Mutant(
        "failed_change_half_undone",
        "store/commit.py",
        "                tx.events.rewind(head)\n",
        "",
        "the event log is a chain without holes",
        ("store",),
    ),
    Mutant(
        "hash_not_chained",
        "store/chain.py",
        "fields = (before, str(seq), at.hex(), *texts)",
        "fields = (str(seq), at.hex(), *texts)",
        "P9: history cannot be changed unseen",
        ("store",),
    ),
    Mutant(
        "guard_without_version",
        "store/attempts.py",
        '    .where(attempts.c.attempt_id == bindparam("id"), attempts.c.version == bindparam("seen"))\n',
        '    .where(attempts.c.attempt_id == bindparam("id"), attempts.c.version >= bindparam("seen"))\n',
        "two writers never overwrite each other",
        ("store",),
    ),
    Mutant(
        "synced_now_and_then",
        "store/sqlite.py",
        '"synchronous = FULL"',
        '"synchronous = NORMAL"',
        "P1: accepted means on disk, also after a power cut",
        ("store",),
    ),
    Mutant(
        "stale_epoch_renews",
        "control/reports.py",
        "    if attempt.epoch != renewal.epoch:\n",
        "    if attempt.epoch < renewal.epoch:\n",
        "P3: a stale epoch is refused everywhere",
        ("control",),
    ),
    Mutant(
        "any_secret_will_do",
        "identity/tokens.py",
        "return is_same and token is not None",
        "return token is not None",
        "P8: nothing without authentication",
        ("attacks",),
    ),
    Mutant(
        "signature_not_compared",
        "identity/signed.py",
        'return token if hmac.compare_digest(expected, match["mac"]) else None',
        'return token if len(expected) == len(match["mac"]) else None',
        "P8: nothing without authentication",
        ("attacks",),
    ),
    Mutant(
        "role_not_compared",
        "identity/authorize.py",
        "    if least is None or not is_at_least(role, least):\n",
        "    if least is None:\n",
        "P8: nobody touches what is not theirs",
        ("attacks",),
    ),
    Mutant(
        "supervisor_speaks_for_others",
        "api/routes/supervisor.py",
        "if (renewal.attempt_id, renewal.node) != (call.caller.attempt_id, call.caller.node):",
        "if renewal.attempt_id != call.caller.attempt_id:",
        "P8: a token is good for its own share alone",
        ("attacks",),
    ),
)
