"""torch.distributed.checkpoint's writer, with a hash of every file as it is written and one end for all.

Write one checkpoint with all ranks: into the first place, from there into the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shoal.errors import StateError
from shoal.runtime.rank.checkpoint.folder_store import CheckpointStore, error_summary
from shoal.runtime.rank.checkpoint.manifest import (
    CheckpointManifest,
    CheckpointName,
    FileRecord,
    IntervalDecision,
    record_save,
)
from shoal.runtime.rank.checkpoint.peer_memory import PeerMemoryStore
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.tiers import Tiers

METADATA = ".metadata"
BUFFER_BYTES = 1 << 20


class HashingWriter(FileSystemWriter):
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


# Said by DCP at each save and load of a program that runs alone, which is nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class CheckpointWrite:
    """Runs in the background, on every rank alike."""

    def __init__(
        self,
        peers: Peers,
        tiers: Tiers,
        name: CheckpointName,
        *,
        run_s: float,
        decision: IntervalDecision | None = None,
    ) -> None:
        self._peers = peers
        self._tiers = tiers
        self._name = name
        self._run_s = run_s
        self._decision = decision
        self._manifest: CheckpointManifest | None = None

    def run(self, state: dict[str, Any] | Exception) -> None:
        """Committed at the first place when it returns, and at the others as far as they took it.

        `state`: or why this rank has none. Then no rank writes: one that stays away from what all do together
        would keep the others waiting, and meet them in the next save instead.
        """
        group, writer = self._peers.group, self._writer(state)
        problems = self._peers.gather(
            None if isinstance(writer, HashingWriter) else f"{type(writer).__name__}: {writer}"
        )
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise RuntimeError(f"rank {rank} could not begin: {problem}")
        assert isinstance(writer, HashingWriter)
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        first, problem = self._tiers.first, None
        if self._tiers.is_in_peer_memory:
            problem = PeerMemoryStore(first, self._peers).commit(
                self._manifest, writer.own_files, self._name.fence
            )
        # What is in no memory for all to see is still where it was written.
        source = first.where(self._name) if problem is None else first.unfinished(self._name)
        copied = [place for place in self._tiers.copies() if self._copy(place, source, writer.own_files)]
        if problem is not None:
            shutil.rmtree(source, ignore_errors=True)
        if self._manifest is not None:
            if problem is not None:
                sys.stderr.write(f"shoal: step {self._name.step} is not in memory: {problem}\n")
            there = copied if problem is not None else [first, *copied]
            labels = tuple(self._tiers.label(place) for place in there)
            record_save(self._tiers.directory, str(self._name), labels, self._decision)

    def _writer(self, state: dict[str, Any] | Exception) -> HashingWriter | Exception:
        if isinstance(state, Exception):
            return state
        try:
            return HashingWriter(
                self._tiers.first.unfinished(self._name), self._peers.world_size, self._commit
            )
        except OSError as error:
            return error

    def _commit(self, files: dict[str, FileRecord]) -> None:
        """On rank 0, when all ranks have written."""
        self._manifest = CheckpointManifest(
            job_id=os.environ.get("SHOAL_JOB_ID", ""),
            step=self._name.step,
            epoch=self._name.fence.epoch,
            rendezvous_round=self._name.fence.rendezvous_round,
            world_size=self._peers.world_size,
            run_s=self._run_s,
            files=files,
        )
        if not self._tiers.is_in_peer_memory:
            self._tiers.first.commit(self._manifest, self._name.fence)

    def _copy(self, place: CheckpointStore, source: str, files: list[str]) -> bool:
        """On rank 0, whether it is there."""
        problem = None
        try:
            place.take(self._name, source, files)
        except Exception as error:  # noqa: BLE001 - every store has errors of its own; all ranks must hear
            problem = error_summary(error)
        problem = next((one for one in self._peers.gather(problem) if one), None)
        if self._manifest is None:
            return False
        if problem is None:
            place.commit(self._manifest, self._name.fence)
        else:
            sys.stderr.write(f"shoal: step {self._name.step} is not at {place.title}: {problem}\n")
        return problem is None


def root_cause(error: BaseException | None) -> BaseException | None:
    """What went wrong where it did: another rank's error comes wrapped. Being fenced comes first.

    Without its traceback, whose frames would keep a group alive that the process has left.
    """
    inner = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    fenced = [one for one in inner if isinstance(one, StateError)]
    cause: BaseException | None = (fenced or inner or [error])[0]
    if cause is not None:
        cause.__context__ = cause.__cause__ = None
        cause.__traceback__ = None
    return cause
