"""Bugs in what is remembered."""

from __future__ import annotations

from tests.mutants.planted.mutant import Mutant

MUTANTS = (
    Mutant(
        "acknowledged_before_the_commit",
        "store/threads.py",
        "            seq = self._committer.commit()\n",
        "            _settle(taken, answers)\n            seq = self._committer.commit()\n",
        "P1: accepted means on disk",
        ("store",),
    ),
    Mutant(
        "failed_change_half_undone",
        "store/transaction.py",
        "                tx.rewind(head)\n",
        "",
        "the event log is a chain without holes",
        ("store",),
    ),
    Mutant(
        "hash_not_chained",
        "store/hash_chain.py",
        "fields = (before, str(seq), at.hex(), *texts)",
        "fields = (str(seq), at.hex(), *texts)",
        "P9: history cannot be changed unseen",
        ("store",),
    ),
    Mutant(
        "guard_without_version",
        "store/tables/attempts.py",
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
)
