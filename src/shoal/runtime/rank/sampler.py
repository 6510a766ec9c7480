"""Which samples this rank trains on next: the same global order at any world size and after any restart.

The state is one integer, the position in an endless sequence of epochs. Global batch k is positions
k * global_batch and on, cut into equal parts by rank; one that reaches the end of an epoch is filled from the
next, so that every batch is whole, ranks never differ in how many they have, and each sample comes exactly
once an epoch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch.utils.data import Sampler as TorchSampler

from shoal.errors import SpecError
from shoal.runtime.rank.permutation import Numbers, permute

AHEAD = 1 << 14
"""Indices computed at once: a call into NumPy costs microseconds, an index in a long array tens of ns."""

Batch = TypeVar("Batch")


class Sampler(TorchSampler[int]):
    """For `DataLoader(data, sampler=sampler, batch_size=sampler.batch_size)`, with any number of workers.

    Rank and world size are read when it is used: after a restart the same object serves another group.
    """

    def __init__(self, data: Sized | int, *, global_batch: int, seed: int = 0) -> None:
        self.size = data if isinstance(data, int) else len(data)
        if self.size < 1 or global_batch < 1:
            raise SpecError(f"{self.size} samples in batches of {global_batch}; both must be 1 or more")
        self.global_batch = global_batch
        self.seed = seed
        self.position = 0
        """Samples that all ranks together were handed, over all epochs."""
        self._begin: int | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.size

    @property
    def batch_size(self) -> int:
        """This rank's part of a global batch. `SpecError`: it cannot be cut into equal parts."""
        world = _world()[1]
        if self.global_batch % world:
            raise SpecError(
                f"a global batch of {self.global_batch} cannot be cut into {world} equal parts",
                hint=f"set global_batch={-(-self.global_batch // world) * world}",
            )
        return self.global_batch // world

    def seek(self, step: int) -> None:
        """Go on with global batch number `step`, counted from 0 over all epochs."""
        self.position = step * self.global_batch

    def set_epoch(self, epoch: int) -> None:
        """Go on with the first batch that begins in this epoch, for loops that count epochs themselves."""
        self.position = -(-epoch * self.size // self.global_batch) * self.global_batch

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """What the loader yields, epoch after epoch without end. A batch is counted when it is handed out.

        Workers fetch ahead: only what came out here is in `position`, so a state saved after a step is exact.
        """
        begin = self.position
        while True:
            self._begin = begin
            for batch in loader:
                begin += self.global_batch
                self.position = begin
                yield batch

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from the position to the end of its epoch."""
        begin = self.position if self._begin is None else self._begin
        self._begin = None
        rank, part, count = _world()[0], self.batch_size, self._batches_from(begin)
        own = np.arange(rank * part, (rank + 1) * part, dtype=np.uint64) + np.uint64(begin)
        many = max(1, AHEAD // part)
        for first in range(0, count, many):
            batches = np.arange(first, min(first + many, count), dtype=np.uint64) * np.uint64(
                self.global_batch
            )
            yield from self.samples((batches[:, None] + own).ravel()).tolist()

    def __len__(self) -> int:
        """How many indices the next iteration yields on this rank."""
        return self._batches_from(self.position) * self.batch_size

    def samples(self, positions: Numbers) -> Numbers:
        """The sample at each position of the endless sequence."""
        epochs, inside = np.divmod(positions, np.uint64(self.size))
        found = np.empty_like(positions)
        for epoch in np.unique(epochs):
            where = epochs == epoch
            found[where] = permute(inside[where], self.size, self.seed, int(epoch))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "size": self.size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go on from there. `SpecError`: it was another order, and nothing has changed."""
        if (state["size"], state["seed"]) != (self.size, self.seed):
            raise SpecError(
                f"the saved order is of {state['size']} samples with seed {state['seed']}; "
                f"this sampler has {self.size} with seed {self.seed}",
                hint=f"use the same data with seed={state['seed']}, or start without the saved state",
            )
        self.position = int(state["position"])

    def _batches_from(self, position: int) -> int:
        """Global batches up to the one that reaches the end of the epoch."""
        left = self.size - position % self.size
        return -(-left // self.global_batch)


def _world() -> tuple[int, int]:
    """Rank and world size: the group's, or what torchrun's variables say, or alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
