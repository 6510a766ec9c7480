"""(snapshot, policy, now) -> plan, with an explanation for every no.

Pure and deterministic: never talks to an engine, never reads a clock, never changes the snapshot.
"""
