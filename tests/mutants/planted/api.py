"""Bugs in the way in over HTTP."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "supervisor_speaks_for_others",
        "api/routes/internal.py",
        "if (renewal.attempt_id, renewal.node) != (call.caller.attempt_id, call.caller.node):",
        "if renewal.attempt_id != call.caller.attempt_id:",
        "P8: a token is good for its own share alone",
        ("attacks",),
    ),
)
