"""The weights of one checkpoint, for a program that serves a model. Reads only, alone, and claims nothing."""

from __future__ import annotations

import os

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from shoal.errors import SpecError, StateError
from shoal.runtime.rank.checkpoint.folder import Folder
from shoal.runtime.rank.checkpoint.manifest import MANIFEST, Manifest, Name, parse_name
from shoal.runtime.rank.checkpoint.parts import capture, restore
from shoal.runtime.rank.checkpoint.writing import cause

VARIABLE = "SHOAL_MODEL_DIR"


def load_model(model: torch.nn.Module, directory: str | None = None, *, part: str = "model") -> int:
    """Fill a model from a checkpoint of `Checkpoints`, every hash compared; returns its step.

    `directory`: the checkpoint, or what a job keeps its checkpoints in, of which the newest that is whole;
    unset: SHOAL_MODEL_DIR. `part`: its name among the parts that were saved; the others are left alone.
    `StateError`: there is none, or it is damaged. `SpecError`: it is of another model, which may be half
    filled.
    """
    where = directory or os.environ.get(VARIABLE)
    if not where:
        raise StateError(f"no checkpoint to load: {VARIABLE} is not set", hint=f"{VARIABLE}=DIRECTORY")
    path, manifest = _chosen(os.path.abspath(where))
    parts = {part: model}
    state = capture(parts)
    try:
        load(state, storage_reader=FileSystemReader(path), no_dist=True)
    except CheckpointException as error:
        raise SpecError(
            f"the checkpoint {path} does not fit this model: {cause(error)}",
            hint="build the model as the program does that wrote it",
        ) from error
    restore(parts, state)
    return manifest.step


def _chosen(path: str) -> tuple[str, Manifest]:
    name = parse_name(os.path.basename(path))
    if name is not None:
        return path, _checked(Folder(os.path.dirname(path), keep=1), name)
    try:
        folder = Folder(path, keep=1)
        names = folder.names()
    except OSError as error:
        raise StateError(f"no checkpoint can be read in {path}: {error.strerror}") from error
    problem: StateError | None = None
    for name in names:
        try:
            return folder.where(name), _checked(folder, name)
        except StateError as error:
            problem = problem or error
    raise problem or StateError(f"there is no checkpoint in {path}", hint="train first")


def _checked(folder: Folder, name: Name) -> Manifest:
    """`StateError`: it is not whole."""
    try:
        manifest = folder.manifest(name)
    except (OSError, ValueError) as error:
        raise StateError(f"checkpoint {name}: its {MANIFEST} cannot be used: {error}") from error
    problem = folder.fetch(name, manifest.files, folder.where(name))
    if problem is not None:
        raise StateError(f"checkpoint {name}: {problem}")
    return manifest
