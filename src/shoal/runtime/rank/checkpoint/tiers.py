"""The places a job's checkpoints go to, from the fastest to the most durable, as one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec

from shoal.errors import SpecError
from shoal.runtime.files import checkpoint_storage
from shoal.runtime.rank.checkpoint.bucket_store import open_bucket
from shoal.runtime.rank.checkpoint.folder_store import CheckpointStore, FolderStore
from shoal.runtime.rank.checkpoint.manifest import MEMORY, CheckpointName, Fence

PEER_MEMORY = -1
"""The place of what is in the memory of several nodes."""


class CheckpointCandidate(msgspec.Struct, frozen=True):
    place: int
    name: CheckpointName


class Tiers:
    """`is_in_memory`: also in the memory of nodes. `url`: also in a bucket."""

    def __init__(self, directory: str | None, *, keep: int, is_in_memory: bool, url: str | None) -> None:
        directory = directory or os.environ.get("SHOAL_CHECKPOINT_DIR")
        if not directory:
            raise SpecError(
                "no directory for checkpoints: the job has none and the program names none",
                hint="add `checkpoint: {}` to the job, or Checkpoints(directory=...)",
            )
        self._directory = FolderStore(directory, keep=keep)
        self.places: list[CheckpointStore] = [self._directory]
        self.first = self._directory
        """Where a save is written; from there it is copied to the others."""
        self.is_in_peer_memory = False
        """Whether that is the memory of several nodes, of which none has all of it: no `Place`."""
        if is_in_memory:
            self.first = FolderStore(_memory_folder(), keep=1)
            self.is_in_peer_memory = not is_on_one_node()
            if not self.is_in_peer_memory:
                self.places.insert(0, self.first)
        if url is not None:
            self.places.append(_place_at(url, keep=keep))

    @property
    def directory(self) -> str:
        return self._directory.title

    def label(self, place: CheckpointStore) -> str:
        """How people are told of it."""
        if place is self._directory:
            return "directory"
        return MEMORY if place is self.first else place.title

    def claim(self, fence: Fence | None) -> Fence:
        """The same number at every place. `StateError`: a later group was at one of them."""
        if fence is None:
            fence = max(place.claim(None) for place in self.places)
        for place in self.places:
            place.claim(fence)
        return fence

    def candidates(self, in_peer_memory: Sequence[CheckpointName] = ()) -> list[CheckpointCandidate]:
        """What is committed anywhere: newest first, and of the same one the fastest place first.

        `spread`: what is in the memory of nodes.
        """
        candidates = [
            CheckpointCandidate(place, name) for place, one in enumerate(self.places) for name in one.names()
        ]
        return sorted(
            [*(CheckpointCandidate(PEER_MEMORY, name) for name in in_peer_memory), *candidates],
            key=_newest_first,
        )

    def copies(self) -> Iterator[CheckpointStore]:
        return (place for place in self.places if place is not self.first)

    def folder_for(self, place: CheckpointStore) -> FolderStore:
        """Where what comes from this place is read: there, or in the directory that it is fetched into."""
        return place if isinstance(place, FolderStore) else self._directory


def _place_at(url: str, *, keep: int) -> CheckpointStore:
    """A file system has no conditional put, but it has locks."""
    path = url.removeprefix("file://")
    return open_bucket(url, keep=keep) if path == url else FolderStore(path, keep=keep)


def _newest_first(candidate: CheckpointCandidate) -> tuple[int, int, int, int]:
    return (
        -candidate.name.fence.epoch,
        -candidate.name.fence.rendezvous_round,
        -candidate.name.step,
        candidate.place,
    )


def is_on_one_node() -> bool:
    """Whether every rank of the group can see this node's memory."""
    world = os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("LOCAL_WORLD_SIZE", world) == world


def _memory_folder() -> str:
    """Make a folder for this user alone. An existing folder of another user is refused."""
    run = os.environ.get("SHOAL_ATTEMPT_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or f"{os.getsid(0)}"
    path = checkpoint_storage.memory_folder(os.getuid(), run, os.environ.get("SHOAL_NODE", ""))
    os.makedirs(path, mode=0o700, exist_ok=True)
    facts = os.lstat(path)
    if facts.st_uid != os.getuid() or os.path.islink(path):
        raise SpecError(f"{path} is not this user's folder; remove it, or do not ask for memory")
    return path
