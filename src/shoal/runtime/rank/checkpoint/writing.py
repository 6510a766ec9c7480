"""Write one checkpoint with all ranks: into the first place, from there into the others."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from shoal.errors import StateError
from shoal.runtime.rank.checkpoint.manifest import FileRecord, Manifest, Name
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.place import Place, said
from shoal.runtime.rank.checkpoint.spread import Spread
from shoal.runtime.rank.checkpoint.status import Decision, note
from shoal.runtime.rank.checkpoint.tiers import Tiers
from shoal.runtime.rank.checkpoint.writer import Writer

# Said by DCP at each save and load of a program that runs alone, which is nothing to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Writing:
    """Runs in the background, on every rank alike."""

    def __init__(
        self, peers: Peers, tiers: Tiers, name: Name, *, run_s: float, decision: Decision | None = None
    ) -> None:
        self._peers = peers
        self._tiers = tiers
        self._name = name
        self._run_s = run_s
        self._decision = decision
        self._manifest: Manifest | None = None

    def land(self, state: dict[str, Any] | Exception) -> None:
        """Committed at the first place when it returns, and at the others as far as they took it.

        `state`: or why this rank has none. Then no rank writes: one that stays away from what all do together
        would keep the others waiting, and meet them in the next save instead.
        """
        group, writer = self._peers.group, self._writer(state)
        problems = self._peers.all(
            None if isinstance(writer, Writer) else f"{type(writer).__name__}: {writer}"
        )
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise RuntimeError(f"rank {rank} could not begin: {problem}")
        assert isinstance(writer, Writer)
        save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        first, problem = self._tiers.first, None
        if self._tiers.is_spread:
            problem = Spread(first, self._peers).commit(self._manifest, writer.own_files, self._name.fence)
        # What is in no memory for all to see is still where it was written.
        source = first.where(self._name) if problem is None else first.unfinished(self._name)
        copied = [place for place in self._tiers.copies() if self._copy(place, source, writer.own_files)]
        if problem is not None:
            shutil.rmtree(source, ignore_errors=True)
        if self._manifest is not None:
            if problem is not None:
                sys.stderr.write(f"shoal: step {self._name.step} is not in memory: {problem}\n")
            there = copied if problem is not None else [first, *copied]
            words = tuple(self._tiers.word(place) for place in there)
            note(self._tiers.directory, str(self._name), words, self._decision)

    def _writer(self, state: dict[str, Any] | Exception) -> Writer | Exception:
        if isinstance(state, Exception):
            return state
        try:
            return Writer(self._tiers.first.unfinished(self._name), self._peers.world_size, self._commit)
        except OSError as error:
            return error

    def _commit(self, files: dict[str, FileRecord]) -> None:
        """On rank 0, when all ranks have written."""
        self._manifest = Manifest(
            job_id=os.environ.get("SHOAL_JOB_ID", ""),
            step=self._name.step,
            epoch=self._name.fence.epoch,
            generation=self._name.fence.generation,
            world_size=self._peers.world_size,
            run_s=self._run_s,
            files=files,
        )
        if not self._tiers.is_spread:
            self._tiers.first.commit(self._manifest, self._name.fence)

    def _copy(self, place: Place, source: str, files: list[str]) -> bool:
        """On rank 0, whether it is there."""
        problem = None
        try:
            place.take(self._name, source, files)
        except Exception as error:  # noqa: BLE001 - every store has errors of its own; all ranks must hear
            problem = said(error)
        problem = next((one for one in self._peers.all(problem) if one), None)
        if self._manifest is None:
            return False
        if problem is None:
            place.commit(self._manifest, self._name.fence)
        else:
            sys.stderr.write(f"shoal: step {self._name.step} is not at {place.title}: {problem}\n")
        return problem is None


def cause(error: BaseException | None) -> BaseException | None:
    """What went wrong where it did: another rank's error comes wrapped. Being fenced comes first.

    Without its traceback, whose frames would keep a group alive that the process has left.
    """
    inner = [one for one, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    fenced = [one for one in inner if isinstance(one, StateError)]
    found: BaseException | None = (fenced or inner or [error])[0]
    if found is not None:
        found.__context__ = found.__cause__ = None
        found.__traceback__ = None
    return found
