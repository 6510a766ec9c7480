"""Change bytes of a job's newest checkpoint, for a drill. Runs as the job's user, in a process of its own."""

from __future__ import annotations

import os
import sys

from shoal import bounded_file
from shoal.runtime.files import checkpoint_storage, removal
from shoal.runtime.rank.checkpoint.manifest import MANIFEST, CheckpointName, parse_name

NUM_BYTES = 64
MAX_NAMES = 10_000


def damage(directory: str, memory: tuple[str, str]) -> None:
    """Flip bytes in the middle of the largest file of the newest checkpoint, and name it on standard error.

    Checkpoints from that one on that the ranks of this attempt and node (`memory`) keep in memory are
    removed, because the ranks would read those. If there are fewer than two checkpoints, the process changes
    nothing and exits with 1.
    """
    names = sorted(filter(None, map(parse_name, bounded_file.list_names(directory, MAX_NAMES))), reverse=True)
    if len(names) < 2:
        has = f"only {names[0]}" if names else "no checkpoint"
        sys.stderr.write(f"{directory} holds {has}; with none before it, all work would be lost\n")
        sys.stderr.flush()
        os._exit(1)
    folder = os.path.join(directory, str(names[0]))
    files = sorted(name for name in bounded_file.list_names(folder, MAX_NAMES) if name != MANIFEST)
    largest = max(files, key=lambda name: os.path.getsize(os.path.join(folder, name)))
    remove_from_memory(checkpoint_storage.memory_folder(os.getuid(), *memory), names[0])
    num_flipped = flip_bytes(os.path.join(folder, largest))
    sys.stderr.write(f"{num_flipped} bytes of {largest} in {names[0]} were changed\n")
    sys.stderr.flush()


def remove_from_memory(memory: str, oldest: CheckpointName) -> None:
    """Remove the checkpoints in this folder that are not older than `oldest`."""
    names = map(parse_name, bounded_file.list_names(memory, MAX_NAMES) if os.path.isdir(memory) else ())
    for name in names:
        if name is not None and name >= oldest:
            removal.remove(os.path.join(memory, str(name)), timeout_s=checkpoint_storage.REMOVE_S)


def flip_bytes(path: str) -> int:
    """Change up to `NUM_BYTES` in the middle of the file, in place, and return how many."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size // 2 - NUM_BYTES // 2))
        at, old = file.tell(), file.read(NUM_BYTES)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in old))
        file.flush()
        os.fsync(file.fileno())
    return len(old)
