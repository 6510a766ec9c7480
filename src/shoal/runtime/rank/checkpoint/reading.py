"""Find the newest checkpoint that is whole, with all ranks, and fill a program's parts from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from shoal.errors import SpecError
from shoal.runtime.rank.checkpoint.manifest import Fence, FileRecord, Manifest, Name
from shoal.runtime.rank.checkpoint.parts import capture, restore
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.place import said
from shoal.runtime.rank.checkpoint.spread import Spread
from shoal.runtime.rank.checkpoint.status import MEMORY
from shoal.runtime.rank.checkpoint.tiers import SPREAD, Candidate, Tiers
from shoal.runtime.rank.checkpoint.writing import cause
from shoal.runtime.rank.state import Stateful

Result = TypeVar("Result")


class Found(msgspec.Struct, frozen=True):
    """A checkpoint that is whole: the folder to read from, and what it says of itself."""

    path: str
    manifest: Manifest
    spread: Spread | None = None
    where: dict[str, int] = {}
    """Of what is spread over the memory of nodes: which has which file."""


class SpreadReader(FileSystemReader):
    """Gets from other nodes what its rank needs, once DCP has said what that is."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.path)
        self._found = found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._found
        assert found.spread is not None
        wanted = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        found.spread.fetch(found.manifest, found.where, wanted)
        return super().read_data(plan, planner)


def find(peers: Peers, tiers: Tiers, fence: Fence) -> Found | None:
    """None: there is no checkpoint that is whole.

    A collective with one answer: rank 0 says which to try, each rank checks a part of its files, and one that
    any rank finds damaged is passed over by all.
    """
    spread = Spread(tiers.first, peers) if tiers.is_spread else None
    names = spread.names() if spread is not None else []
    for one in peers.from_first(lambda: tiers.candidates(names)):
        if one.place == SPREAD and spread is not None:
            title, found = MEMORY, _gathered(spread, one.name)
        else:
            title, found = tiers.places[one.place].title, _checked(peers, tiers, one, fence)
        if isinstance(found, Found):
            return found
        if peers.rank == 0:
            sys.stderr.write(f"shoal: passing over {one.name} at {title}: {found}\n")
    return None


def read(peers: Peers, parts: Mapping[str, Stateful], found: Found) -> Manifest:
    """Fill the parts. `SpecError`: what was saved does not fit them."""
    state = capture(parts)
    try:
        reader = FileSystemReader(found.path) if found.spread is None else SpreadReader(found)
        group = peers.group
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise SpecError(
            f"the checkpoint of step {found.manifest.step} does not fit this program: {cause(error)}",
            hint=f"run the program that wrote it, or move {found.path} away",
        ) from error
    finally:
        if found.spread is not None:
            found.spread.close(found.manifest)
    restore(parts, state)
    return found.manifest


def _gathered(spread: Spread, name: Name) -> Found | str:
    found = spread.find(name)
    if isinstance(found, str):
        return found
    manifest, where = found
    try:
        return Found(spread.open(manifest, where), manifest, spread, where)
    except OSError as error:
        return str(error)


def _checked(peers: Peers, tiers: Tiers, one: Candidate, fence: Fence) -> Found | str:
    """It can be read from a folder now; or why not."""
    place = tiers.places[one.place]
    folder = tiers.folder_for(place)
    manifest = peers.from_first(lambda: _tried(lambda: place.manifest(one.name)))
    if isinstance(manifest, str):
        return manifest
    own = _share(manifest.files, peers)
    problem = _worst(peers, _tried(lambda: place.fetch(one.name, own, folder.unfinished(one.name))))
    if problem is None and place is not folder:
        put = _tried(lambda: folder.commit(manifest, fence)) if peers.rank == 0 else None
        problem = _worst(peers, put)
    return problem or Found(folder.where(one.name), manifest)


def _share(files: dict[str, FileRecord], peers: Peers) -> dict[str, FileRecord]:
    return {file: files[file] for file in sorted(files)[peers.rank :: peers.world_size]}


def _worst(peers: Peers, problem: str | None) -> str | None:
    return next((one for one in peers.all(problem) if one is not None), None)


def _tried(action: Callable[[], Result]) -> Result | str:
    """What it returns, or what it raised as a sentence: the others wait for an answer either way."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - a damaged one may fail in any way; the one before is next
        return f"{type(error).__name__}: {said(error)}"
