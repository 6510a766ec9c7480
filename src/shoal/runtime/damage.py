"""Change bytes of a job's newest checkpoint, for a drill. Runs as the job's user, in a process of its own."""

from __future__ import annotations

import os
import sys

from shoal.runtime.rank.checkpoint.manifest import MANIFEST, parse_name

NUM_BYTES = 64


def damage(directory: str) -> None:
    """Flip bytes in the middle of the largest file of the newest checkpoint, and say which on standard error.

    Ends the process with 1, having changed nothing, where there are fewer than two: none would be left.
    """
    names = sorted(filter(None, map(parse_name, os.listdir(directory))), reverse=True)
    if len(names) < 2:
        has = f"only {names[0]}" if names else "no checkpoint"
        sys.stderr.write(f"{directory} holds {has}; with none before it, all work would be lost\n")
        sys.stderr.flush()
        os._exit(1)
    folder = os.path.join(directory, str(names[0]))
    files = sorted(name for name in os.listdir(folder) if name != MANIFEST)
    largest = max(files, key=lambda name: os.path.getsize(os.path.join(folder, name)))
    num_flipped = flip(os.path.join(folder, largest))
    sys.stderr.write(f"{num_flipped} bytes of {largest} in {names[0]} were changed\n")
    sys.stderr.flush()


def flip(path: str) -> int:
    """Change up to `NUM_BYTES` in the middle of the file, in place; how many it were."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size // 2 - NUM_BYTES // 2))
        at, old = file.tell(), file.read(NUM_BYTES)
        file.seek(at)
        file.write(bytes(byte ^ 0xFF for byte in old))
        file.flush()
        os.fsync(file.fileno())
    return len(old)
