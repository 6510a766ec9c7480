"""Bugs in what exists: states, moves, and what is tried again."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "stopped_job_is_tried_again",
        "model/retry.py",
        "if job.stop_asked_by is not None or attempt.reason is EndReason.CANCELLED:",
        "if attempt.reason is EndReason.CANCELLED:",
        "a person's stop is final",
        ("sim",),
    ),
    Mutant(
        "losses_are_never_forgotten",
        "model/retry.py",
        "before = 0 if _lived_s(attempt, now - silent_s) >= LONG_LIFE_S else job.losses",
        "before = job.losses",
        "P1: a job that works for a day and is lost goes on for as many days as it takes",
        ("control",),
    ),
    Mutant(
        "waiting_for_a_share_that_never_begins_is_all_the_life_there_was",
        "model/retry.py",
        "if one.lost.is_unasked or is_in_vain:",
        "if one.lost.is_unasked:",
        "P1: a gang whose nodes others get each day goes on for as many days as it takes",
        ("control",),
    ),
    Mutant(
        "to_wait_for_a_fence_is_a_life",
        "model/retry.py",
        "_lived_s(attempt, now - silent_s)",
        "_lived_s(attempt, now)",
        "a job that takes its machine down with it ends some time",
        ("control",),
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
        "signal_to_all_nodes_is_a_failure_of_one",
        "model/moves.py",
        "    if not any(one.is_unasked for one in failed):\n",
        "    if failed:\n",
        "P1: whom the cluster stopped has not failed",
        ("moves",),
    ),
    Mutant(
        "old_look_stops_a_gang_that_was_mended",
        "model/moves.py",
        "if event.node not in attempt.nodes_left or event.incarnation != attempt.incarnation(event.node):",
        "if event.node not in attempt.node_names:",
        "P2: no healthy kill for a share that another has replaced",
        ("control",),
    ),
    Mutant(
        "cluster_withdraws_what_a_keeper_said",
        "model/moves.py",
        "known = attempt.doubted_nodes if event.is_hearsay else attempt.orphaned_nodes",
        "known = attempt.orphaned_nodes",
        "P3: that a cluster knows of nothing is no word against who saw it live",
        ("control",),
    ),
    Mutant(
        "next_share_inherits_the_doubt",
        "model/moves.py",
        "return _cleared(after, lost.node), (Effect.SUBMIT,)",
        "return after, (Effect.SUBMIT,)",
        "P1: a share has a fence of its own",
        ("control",),
    ),
    Mutant(
        "end_of_a_replaced_share_ends_the_new_one",
        "model/moves.py",
        "    if outcome.incarnation != attempt.incarnation(outcome.node):\n        return attempt, ()\n",
        "",
        "P2: what was replaced says nothing about what runs in its place",
        ("control", "sim"),
    ),
)
