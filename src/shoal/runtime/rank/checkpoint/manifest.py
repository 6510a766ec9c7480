"""What a checkpoint says of itself, and what its folder is called.

A program's status of its own saves, written beside them for other processes: where they are, what they cost.

Written by rank 0 when a save has landed. Nothing depends on it: a program that finds none goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from enum import StrEnum

import msgspec

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20
NAME = re.compile(r"step-(\d{12})-(\d+)-(\d+)")


class Fence(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Which group of ranks, of which attempt: a later one shuts out all before it."""

    epoch: int = 0
    rendezvous_round: int = 0


class CheckpointName(msgspec.Struct, frozen=True, order=True):
    """Sorts by when it was made: a later group first goes back to an earlier step, then on from there."""

    fence: Fence
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:012d}-{self.fence.epoch}-{self.fence.rendezvous_round}"


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last: a folder without one was never finished."""

    version: int = 1
    job_id: str
    step: int
    epoch: int
    rendezvous_round: int
    world_size: int
    run_s: float
    """How long the job had trained by then, over all attempts."""
    files: dict[str, FileRecord]

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(Fence(epoch=self.epoch, rendezvous_round=self.rendezvous_round), self.step)


def parse_name(text: str) -> CheckpointName | None:
    """The name a folder bears; None: it is not a checkpoint's."""
    match = NAME.fullmatch(text)
    if match is None:
        return None
    step, epoch, rendezvous_round = map(int, match.groups())
    return CheckpointName(Fence(epoch=epoch, rendezvous_round=rendezvous_round), step)


def read_manifest(data: bytes, name: CheckpointName) -> CheckpointManifest:
    """`ValueError`: it is damaged, or of another checkpoint."""
    try:
        manifest = msgspec.json.decode(data, type=CheckpointManifest)
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


STATUS = ".status.json"
MAX_KEPT = 64
MEMORY = "memory"


class IntervalReason(StrEnum):
    """Why saves are as far apart as they are."""

    EVERY = "every"
    """The program says after how many steps."""
    INTERVAL = "interval"
    """The job says after how long."""
    FIRST = "first"
    """Unspecified, and the cost of a save is not known yet."""
    COST = "cost"
    """Unspecified: chosen from the cost of a save and the failure rate of the job."""


class IntervalDecision(msgspec.Struct, frozen=True, kw_only=True):
    """How far it is from one save to the next, and what that rests on."""

    reason: IntervalReason
    steps: int
    step_s: float
    cost_s: float | None = None
    """How long the save before held training up."""
    written_s: float = 0.0
    """How long it then went on in the background."""
    interval_s: float | None = None
    mtbf_s: float | None = None
    """Expected seconds between failures."""


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    decision: IntervalDecision | None = None
    places_by_name: dict[str, tuple[str, ...]] = {}
    """By the name of a checkpoint, in the order they were made, where it was put."""


def read_status(data: bytes) -> CheckpointStatus | None:
    """None: it is not one, or of another version."""
    try:
        return msgspec.json.decode(data, type=CheckpointStatus)
    except (ValueError, RecursionError):
        return None


def record_save(folder: str, name: str, places: tuple[str, ...], decision: IntervalDecision | None) -> None:
    """Add one to what stands there. A folder that cannot be written has said so already."""
    path = os.path.join(folder, STATUS)
    with contextlib.suppress(OSError):
        before = CheckpointStatus()
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            before = read_status(file.read()) or before
        # Memory holds the newest alone.
        others = {one: _without_memory(where) for one, where in before.places_by_name.items() if one != name}
        kept = {**others, name: places}
        newest = dict(list(kept.items())[-MAX_KEPT:])
        with open(f"{path}.new", "wb") as file:
            file.write(msgspec.json.encode(CheckpointStatus(decision=decision, places_by_name=newest)))
        os.rename(f"{path}.new", path)


def _without_memory(places: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(place for place in places if place != MEMORY)
