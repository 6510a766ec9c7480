"""A sampler with the same global order of samples at any world size and after any restart.

The order of an epoch is a keyed permutation, which computes the sample at any position directly, without a
list of all samples. It is a Feistel network over the next even number of bits, repeated until the value is in
range (cycle walking). This is a bijection of 0..size-1 whatever the rounds do. It is no cryptography.

The state is one integer: the position in an endless sequence of epochs. Global batch k has the positions from
k * global_batch on, cut into equal parts by rank. A batch that reaches the end of an epoch is filled from the
next epoch. So every batch is full, all ranks have equally many samples, and each sample comes exactly once
per epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

from shoal.errors import SpecError

ROUNDS = 6
"""Four rounds mix well if a half has many bits. Sets of a few samples have halves of two bits and need
more."""

Numbers = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def permute(positions: Numbers, size: int, seed: int, epoch: int) -> Numbers:
    """Return the sample at each of these positions, all below `size`, in the order of (seed, epoch)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _keys(seed, epoch)
    values = _feistel(positions, half, keys)
    outside = np.flatnonzero(values >= size)
    # The network covers less than four times the set, so each pass leaves at most three quarters outside.
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values


def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """Return one key for each round. Neighbouring seeds and epochs give unrelated keys."""
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
    """Mix in place by two multiplications with overflow, which is enough for one of several rounds."""
    values ^= values >> np.uint64(32)
    values *= np.uint64(_FIRST)
    values ^= values >> np.uint64(29)
    values *= np.uint64(_SECOND)
    return values >> np.uint64(32)


AHEAD = 1 << 14
"""Indices computed at once. A call into NumPy costs microseconds, an index in a long array tens of ns."""

Batch = TypeVar("Batch")


class Sampler(TorchSampler[int]):
    """A sampler for `DataLoader(data, sampler=sampler, batch_size=sampler.batch_size)` with any number of
    workers.

    It reads rank and world size at each use, so the same object works after a restart with another group.
    """

    def __init__(self, data: Sized | int, *, global_batch: int, seed: int = 0) -> None:
        self.size = data if isinstance(data, int) else len(data)
        if self.size < 1 or global_batch < 1:
            raise SpecError(f"{self.size} samples in batches of {global_batch}; both must be 1 or more")
        self.global_batch = global_batch
        self.seed = seed
        self.position = 0
        """Samples handed out to all ranks together, over all epochs."""
        self._begin: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.size

    @property
    def batch_size(self) -> int:
        """This rank's part of a global batch. `SpecError`: the batch cannot be cut into equal parts."""
        world = _world()[1]
        if self.global_batch % world:
            raise SpecError(
                f"a global batch of {self.global_batch} cannot be cut into {world} equal parts",
                hint=f"set global_batch={-(-self.global_batch // world) * world}",
            )
        return self.global_batch // world

    def seek(self, step: int) -> None:
        """Continue with global batch number `step`, counted from 0 over all epochs."""
        self.position = step * self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Continue with the first batch that begins in this epoch, for loops that count epochs themselves."""
        self.position = -(-epoch * self.size // self.global_batch) * self.global_batch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the loader's batches, epoch after epoch without end. A batch counts when it is yielded.

        Workers fetch ahead, but `position` counts only yielded batches, so a state saved after a step is
        exact.
        """
        begin = self.position
        while True:
            self._begin = begin
            for batch in loader:
                begin += self.global_batch
                self.position = begin
                yield batch

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices from the position to the end of its epoch."""
        begin = self.position if self._begin is None else self._begin
        self._begin = None
        rank, part, count = _world()[0], self.batch_size, self._batches_from(begin)
        own_positions = np.arange(rank * part, (rank + 1) * part, dtype=np.uint64) + np.uint64(begin)
        many = max(1, AHEAD // part)
        for first in range(0, count, many):
            batches = np.arange(first, min(first + many, count), dtype=np.uint64) * np.uint64(
                self.global_batch
            )
            yield from self.samples((batches[:, None] + own_positions).ravel()).tolist()

    def __len__(self) -> int:
        """Return how many indices the next iteration yields on this rank."""
        return self._batches_from(self.position) * self.batch_size

    def samples(self, positions: Numbers) -> Numbers:
        """Return the sample at each position of the endless sequence."""
        epochs, inside = np.divmod(positions, np.uint64(self.size))
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs):
            where = epochs == epoch
            samples[where] = permute(inside[where], self.size, self.seed, int(epoch))
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from this state. `SpecError`: it is of another order, and nothing has changed."""
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise SpecError(
                f"the saved order is of {state['size']} samples with seed {state['seed']}; "
                f"this sampler has {self.size} with seed {self.seed}",
                hint=f"use the same data with seed={state['seed']}, or start without the saved state",
            )
        self.position = int(state["position"])

    def _batches_from(self, position: int) -> int:
        """Return the number of global batches up to the one that reaches the end of the epoch."""
        left = self.size - position % self.size
        return -(-left // self.global_batch)


def _world() -> tuple[int, int]:
    """Return rank and world size: of the group, else from torchrun's variables, else 0 and 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
