"""The order of an epoch as a keyed permutation: any position's sample at once, without a list of them.

A Feistel network over the next even number of bits, walked on until the value lies inside (cycle walking),
is a bijection of 0..size-1 whatever its rounds do. Pure; nothing here is a secret.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

ROUNDS = 6
"""Four mix well where a half has many bits; sets of a few samples have halves of two, and want more."""

Numbers = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def permute(positions: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """The sample at each of these positions, all below `size`, in the order of (seed, epoch)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = _feistel(positions, half, keys)
    outside = np.flatnonzero(values >= size)
    # The network covers less than four times the set: each turn leaves at most three quarters outside.
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """One for each round; neighbouring seeds and epochs have nothing in common."""
    state = _mix(_mix(seed & _MASK) ^ (epoch & _MASK))
    return [np.uint64(_mix((state + turn * _GOLDEN) & _MASK)) for turn in range(1, ROUNDS + 1)]


def _mix(value: int) -> int:
    """A bijection of 64 bits in which every bit depends on every other."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _feistel(values: Numbers, half: int, keys: list[np.uint64]) -> Numbers:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_scramble(right + key) & mask)
    return (left << shift) | right


def _scramble(values: Numbers) -> Numbers:
    """Two multiplications, wrapping round: enough for one of several rounds. Changes what it is given."""
    values ^= values >> np.uint64(32)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(29)
    values *= np.uint64(_SECOND)
    return values >> np.uint64(32)
