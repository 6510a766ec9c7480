"""Find the newest checkpoint that is whole, with all ranks, and fill a program's parts from it.

The weights of one checkpoint, for a program that serves a model. Reads only, alone, and claims nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from shoal.errors import SpecError, StateError
from shoal.runtime.rank.checkpoint.folder_store import FolderStore, error_summary
from shoal.runtime.rank.checkpoint.manifest import (
    MANIFEST,
    MEMORY,
    CheckpointManifest,
    CheckpointName,
    Fence,
    FileRecord,
    parse_name,
)
from shoal.runtime.rank.checkpoint.parts import capture, restore
from shoal.runtime.rank.checkpoint.peer_memory import PeerMemoryStore
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.tiers import PEER_MEMORY, CheckpointCandidate, Tiers
from shoal.runtime.rank.checkpoint.writing import root_cause
from shoal.runtime.rank.training_state import Stateful

Result = TypeVar("Result")


class FoundCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is whole: the folder to read from, and what it says of itself."""

    path: str
    manifest: CheckpointManifest
    peer_memory: PeerMemoryStore | None = None
    where: dict[str, int] = {}
    """Of what is spread over the memory of nodes: which has which file."""


class PeerMemoryReader(FileSystemReader):
    """Gets from other nodes what its rank needs, once DCP has said what that is."""

    def __init__(self, checkpoint: FoundCheckpoint) -> None:
        super().__init__(checkpoint.path)
        self._found = checkpoint

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        location = self._found
        assert location.peer_memory is not None
        wanted = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        location.peer_memory.fetch(location.manifest, location.where, wanted)
        return super().read_data(plan, planner)


def find_newest(peers: Peers, tiers: Tiers, fence: Fence) -> FoundCheckpoint | None:
    """None: there is no checkpoint that is whole.

    A collective with one answer: rank 0 says which to try, each rank checks a part of its files, and one that
    any rank finds damaged is passed over by all.
    """
    spread = PeerMemoryStore(tiers.first, peers) if tiers.is_in_peer_memory else None
    names = spread.names() if spread is not None else []
    for one in peers.from_rank_zero(lambda: tiers.candidates(names)):
        if one.place == PEER_MEMORY and spread is not None:
            title, source = MEMORY, _in_peer_memory(spread, one.name)
        else:
            title, source = tiers.places[one.place].title, _check_at(peers, tiers, one, fence)
        if isinstance(source, FoundCheckpoint):
            return source
        if peers.rank == 0:
            sys.stderr.write(f"shoal: passing over {one.name} at {title}: {source}\n")
    return None


def fill_parts(
    peers: Peers, parts: Mapping[str, Stateful], checkpoint: FoundCheckpoint
) -> CheckpointManifest:
    """Fill the parts. `SpecError`: what was saved does not fit them."""
    state = capture(parts)
    try:
        reader = (
            FileSystemReader(checkpoint.path)
            if checkpoint.peer_memory is None
            else PeerMemoryReader(checkpoint)
        )
        group = peers.group
        load(state, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise SpecError(
            f"the checkpoint of step {checkpoint.manifest.step} does not fit this "
            f"program: {root_cause(error)}",
            hint=f"run the program that wrote it, or move {checkpoint.path} away",
        ) from error
    finally:
        if checkpoint.peer_memory is not None:
            checkpoint.peer_memory.close(checkpoint.manifest)
    restore(parts, state)
    return checkpoint.manifest


def _in_peer_memory(spread: PeerMemoryStore, name: CheckpointName) -> FoundCheckpoint | str:
    copies = spread.find(name)
    if isinstance(copies, str):
        return copies
    manifest, where = copies
    try:
        return FoundCheckpoint(spread.open(manifest, where), manifest, spread, where)
    except OSError as error:
        return str(error)


def _check_at(
    peers: Peers, tiers: Tiers, candidate: CheckpointCandidate, fence: Fence
) -> FoundCheckpoint | str:
    """It can be read from a folder now; or why not."""
    place = tiers.places[candidate.place]
    folder = tiers.folder_for(place)
    manifest = peers.from_rank_zero(lambda: _result_or_problem(lambda: place.manifest(candidate.name)))
    if isinstance(manifest, str):
        return manifest
    own_files = _own_files(manifest.files, peers)
    problem = _first_problem(
        peers,
        _result_or_problem(lambda: place.fetch(candidate.name, own_files, folder.unfinished(candidate.name))),
    )
    if problem is None and place is not folder:
        put = _result_or_problem(lambda: folder.commit(manifest, fence)) if peers.rank == 0 else None
        problem = _first_problem(peers, put)
    return problem or FoundCheckpoint(folder.where(candidate.name), manifest)


def _own_files(files: dict[str, FileRecord], peers: Peers) -> dict[str, FileRecord]:
    return {file: files[file] for file in sorted(files)[peers.rank :: peers.world_size]}


def _first_problem(peers: Peers, problem: str | None) -> str | None:
    return next((one for one in peers.gather(problem) if one is not None), None)


def _result_or_problem(action: Callable[[], Result]) -> Result | str:
    """What it returns, or what it raised as a sentence: the others wait for an answer either way."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - a damaged one may fail in any way; the one before is next
        return f"{type(error).__name__}: {error_summary(error)}"


MODEL_DIR_VARIABLE = "SHOAL_MODEL_DIR"


def load_model(model: torch.nn.Module, directory: str | None = None, *, part: str = "model") -> int:
    """Fill a model from a checkpoint of `Checkpoints`, every hash compared; returns its step.

    `directory`: the checkpoint, or what a job keeps its checkpoints in, of which the newest that is whole;
    unset: SHOAL_MODEL_DIR. `part`: its name among the parts that were saved; the others are left alone.
    `StateError`: there is none, or it is damaged. `SpecError`: it is of another model, which may be half
    filled.
    """
    where = directory or os.environ.get(MODEL_DIR_VARIABLE)
    if not where:
        raise StateError(
            f"no checkpoint to load: {MODEL_DIR_VARIABLE} is not set", hint=f"{MODEL_DIR_VARIABLE}=DIRECTORY"
        )
    path, manifest = _choose(os.path.abspath(where))
    parts = {part: model}
    state = capture(parts)
    try:
        load(state, storage_reader=FileSystemReader(path), no_dist=True)
    except CheckpointException as error:
        raise SpecError(
            f"the checkpoint {path} does not fit this model: {root_cause(error)}",
            hint="build the model as the program does that wrote it",
        ) from error
    restore(parts, state)
    return manifest.step


def _choose(path: str) -> tuple[str, CheckpointManifest]:
    name = parse_name(os.path.basename(path))
    if name is not None:
        return path, _check_whole(FolderStore(os.path.dirname(path), keep=1), name)
    try:
        folder = FolderStore(path, keep=1)
        names = folder.names()
    except OSError as error:
        raise StateError(f"no checkpoint can be read in {path}: {error.strerror}") from error
    problem: StateError | None = None
    for name in names:
        try:
            return folder.where(name), _check_whole(folder, name)
        except StateError as error:
            problem = problem or error
    raise problem or StateError(f"there is no checkpoint in {path}", hint="train first")


def _check_whole(folder: FolderStore, name: CheckpointName) -> CheckpointManifest:
    """`StateError`: it is not whole."""
    try:
        manifest = folder.manifest(name)
    except (OSError, ValueError) as error:
        raise StateError(f"checkpoint {name}: its {MANIFEST} cannot be used: {error}") from error
    problem = folder.fetch(name, manifest.files, folder.where(name))
    if problem is not None:
        raise StateError(f"checkpoint {name}: {problem}")
    return manifest
