"""Find the newest checkpoint that is whole, with all ranks, and fill a program's parts from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from shoal.errors import SpecError
from shoal.runtime.rank.checkpoint.manifest import Fence, FileRecord, Manifest
from shoal.runtime.rank.checkpoint.parts import capture, restore
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.tiers import Candidate, Tiers
from shoal.runtime.rank.checkpoint.writing import cause
from shoal.runtime.rank.state import Stateful

Result = TypeVar("Result")


def find(peers: Peers, tiers: Tiers, fence: Fence) -> tuple[str, Manifest] | None:
    """The folder to read, and what it says of itself; None: there is no checkpoint that is whole.

    A collective with one answer: rank 0 says which to try, each rank checks a part of its files, and one that
    any rank finds damaged is passed over by all.
    """
    for one in peers.from_first(tiers.candidates):
        place = tiers.places[one.place]
        found = _checked(peers, tiers, one, fence)
        if isinstance(found, Manifest):
            return tiers.folder_for(place).where(one.name), found
        if peers.rank == 0:
            sys.stderr.write(f"shoal: passing over {one.name} at {place.title}: {found}\n")
    return None


def read(peers: Peers, parts: Mapping[str, Stateful], path: str, manifest: Manifest) -> None:
    """Fill the parts. `SpecError`: what was saved does not fit them."""
    state = capture(parts)
    try:
        reader, group = FileSystemReader(path), peers.group
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise SpecError(
            f"the checkpoint of step {manifest.step} does not fit this program: {cause(error)}",
            hint=f"run the program that wrote it, or move {path} away",
        ) from error
    restore(parts, state)


def _checked(peers: Peers, tiers: Tiers, one: Candidate, fence: Fence) -> Manifest | str:
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
    return problem or manifest


def _share(files: dict[str, FileRecord], peers: Peers) -> dict[str, FileRecord]:
    return {file: files[file] for file in sorted(files)[peers.rank :: peers.world_size]}


def _worst(peers: Peers, problem: str | None) -> str | None:
    return next((one for one in peers.all(problem) if one is not None), None)


def _tried(action: Callable[[], Result]) -> Result | str:
    """What it returns, or what it raised as a sentence: the others wait for an answer either way."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - a damaged one may fail in any way; the one before is next
        return f"{type(error).__name__}: {error}"
