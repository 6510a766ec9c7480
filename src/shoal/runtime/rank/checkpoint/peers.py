"""The ranks that save and load together, in a group of their own beside training's."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

TIMEOUT = timedelta(minutes=10)
"""Ranks wait for the slowest writer."""

Value = TypeVar("Value")


class Peers:
    """Alone where no group was made. Used by one thread at a time; every call is a collective.

    Groups are held weakly: one that outlives its destruction by the program aborts the process at its end.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1
        world = _world()
        self._world = self._group = None
        if world is not None:
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._world, self._group = weakref.ref(world), weakref.ref(group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: there never was one. `RuntimeError`: it is gone."""
        if self._group is None:
            return None
        group: dist.ProcessGroup | None = self._group()
        if group is None:
            raise RuntimeError("the group of ranks is gone")
        return group

    def is_current(self) -> bool:
        """Whether the process is still in the group that these are the ranks of."""
        return _world() is (None if self._world is None else self._world() or self)

    def all(self, value: Value) -> list[Value]:
        """Everyone's value, by rank."""
        values: list[Any] = [value] * self.world_size
        if self._group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, make: Callable[[], Value]) -> Value:
        """What rank 0 makes; the others make nothing."""
        values: list[Any] = [make() if self.rank == 0 else None]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self.group)
        result: Value = values[0]
        return result


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
