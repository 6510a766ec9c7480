"""torch.distributed.checkpoint's writer, with a hash of every file as it is written and one end for all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shoal.runtime.rank.checkpoint.manifest import FileRecord

METADATA = ".metadata"
BUFFER_BYTES = 1 << 20


class Writer(FileSystemWriter):
    """Writes this rank's part into `path`; on rank 0, `finished` is called when all have written theirs.

    What `finished` raises fails the save on every rank. Copies to the host were made before: no stream of a
    device is used here.
    """

    def __init__(self, path: str, world_size: int, finished: Callable[[dict[str, FileRecord]], None]) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=False, per_thread_copy_ahead=0)
        self.fs = self._files = HashedFiles()
        self._world_size = world_size
        self._finished = finished

    @property
    def own_files(self) -> list[str]:
        """What this rank has written so far."""
        return [METADATA if name == f"{METADATA}.tmp" else name for name in self._files.records]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        records = dict(self._files.records)
        done: Future[list[WriteResult]] = Future()
        done.set_result(
            [dataclasses.replace(one, storage_data=(one.storage_data, records)) for one in results]
        )
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if len(results) != self._world_size:
            # Where the process has left its group by now, DCP takes it for a program of one rank.
            raise RuntimeError(
                f"{len(results)} of {self._world_size} ranks have written: their group is gone"
            )
        files: dict[str, FileRecord] = {}
        for one in (one for of_rank in results for one in of_rank):
            files.update(one.storage_data[1])
        plain = [
            [dataclasses.replace(one, storage_data=one.storage_data[0]) for one in of_rank]
            for of_rank in results
        ]
        super().finish(metadata, plain)
        files[METADATA] = self._files.records[f"{METADATA}.tmp"]
        self._finished(files)


class HashedFiles(FileSystem):
    """Files of one folder, each remembered with what was written into it."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with open(path, mode, buffering=0) as raw:
            hashed = _Hashed(raw)
            with io.BufferedWriter(hashed, BUFFER_BYTES) as stream:
                yield stream
        self.records[os.path.basename(path)] = FileRecord(
            num_bytes=hashed.num_bytes, sha256=hashed.digest.hexdigest()
        )


class _Hashed(io.RawIOBase):
    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        written: int = self._raw.write(data)
        self.digest.update(memoryview(data)[:written])
        self.num_bytes += written
        return written

    def tell(self) -> int:
        return self.num_bytes

    def seekable(self) -> bool:
        return False

    def fileno(self) -> int:
        number: int = self._raw.fileno()
        return number

    def close(self) -> None:
        """DCP syncs before the last buffer is written; what counts is synced here, after it."""
        if not self.closed:
            os.fsync(self._raw.fileno())
        super().close()
