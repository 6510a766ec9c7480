"""The queries, one file for each noun. Every class here works inside one transaction of `Tx`.

A write is guarded: `where id = ? and version = ?`. Zero changed rows raise `StaleRecord`, and the whole
transaction is rolled back.

    submissions -> jobs -> attempts   new jobs with their first attempts, jobs, attempts
    nodes, services, metrics          what exists besides jobs, and the curves of both
    people, tokens                    users, projects, memberships, and the tree of tokens
    events                            the append-only log, chained by hashes
    bookkeeping                       small facts about the installation, and daily counters
"""
