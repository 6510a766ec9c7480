"""What a checkpoint says of itself, and what its folder is called."""

from __future__ import annotations

import hashlib
import os
import re

import msgspec

MANIFEST = "manifest.json"
PIECE_BYTES = 1 << 20
NAME = re.compile(r"step-(\d{12})-(\d+)-(\d+)")


class Fence(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Which group of ranks, of which attempt: a later one shuts out all before it."""

    epoch: int = 0
    generation: int = 0


class Name(msgspec.Struct, frozen=True, order=True):
    """Sorts by when it was made: a later group first goes back to an earlier step, then on from there."""

    fence: Fence
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}-{self.fence.epoch}-{self.fence.generation}"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: a folder without one was never finished."""

    version: int = 1
    job_id: str
    step: int
    epoch: int
    generation: int
    world_size: int
    run_s: float
    """How long the job had trained by then, over all attempts."""
    files: dict[str, FileRecord]

    @property
    def name(self) -> Name:
        return Name(Fence(epoch=self.epoch, generation=self.generation), self.step)


def parse_name(text: str) -> Name | None:
    """The name a folder bears; None: it is not a checkpoint's."""
    match = NAME.fullmatch(text)
    if match is None:
        return None
    step, epoch, generation = map(int, match.groups())
    return Name(Fence(epoch=epoch, generation=generation), step)


def read_manifest(data: bytes, name: Name) -> Manifest:
    """`ValueError`: it is damaged, or of another checkpoint."""
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if manifest.name != name:
        raise ValueError(f"its manifest is of {manifest.name}")
    if any(os.path.basename(file) != file for file in manifest.files):
        raise ValueError("its manifest names files outside of it")
    return manifest


def problem_of(path: str, record: FileRecord) -> str | None:
    """What is wrong with this file, as the end of a sentence; None: it is as it was written."""
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != record.num_bytes:
                return f"{os.path.basename(path)} has {num_bytes} bytes of {record.num_bytes}"
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                return f"{os.path.basename(path)} is not what was written"
    except OSError as error:
        return f"{os.path.basename(path)} cannot be read: {error.strerror}"
    return None
