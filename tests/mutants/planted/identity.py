"""Bugs in who may do what."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "any_secret_will_do",
        "identity/credentials.py",
        "return is_same and token is not None",
        "return token is not None",
        "P8: nothing without authentication",
        ("attacks",),
    ),
    Mutant(
        "signature_not_compared",
        "identity/credentials.py",
        'return token if hmac.compare_digest(expected, match["mac"]) else None',
        'return token if len(expected) == len(match["mac"]) else None',
        "P8: nothing without authentication",
        ("attacks",),
    ),
    Mutant(
        "role_not_compared",
        "identity/authorization.py",
        "    if least is None or not is_at_least(role, least):\n",
        "    if least is None:\n",
        "P8: nobody touches what is not theirs",
        ("attacks",),
    ),
)
