"""Which rank writes what several of them hold alike. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def divide(held: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The rank that writes each key, given the bytes of each key on each rank: about as many for each.

    What is said to have no bytes is written by the first that holds it. Every rank that computes this from
    the same input gets the same answer.
    """
    holders: dict[str, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    loads = [0] * len(held)
    owners = {}
    for key in sorted(holders, key=lambda key: (-held[holders[key][0]][key], key)):
        first = holders[key][0]
        owner = min(holders[key], key=lambda rank: (loads[rank], rank)) if held[first][key] else first
        owners[key] = owner
        loads[owner] += held[owner][key]
    return owners
