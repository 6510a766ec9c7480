"""What a program uses: save in the background, load the newest that is whole, decide when one is due.

All ranks of the group call the same methods in the same order. Outside of Shoal it works alike, under
torchrun or alone: then a run that starts later shuts out one that still writes.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch

from shoal.errors import ShoalError, StateError
from shoal.runtime.rank.arguments import check_parts, whole_number
from shoal.runtime.rank.checkpoint.background_save import BackgroundSave, CheckpointStage
from shoal.runtime.rank.checkpoint.manifest import CheckpointName, Fence
from shoal.runtime.rank.checkpoint.parts import (
    assign_owners,
    capture,
    copy_buffers,
    optimizers_of,
    replicated_bytes,
)
from shoal.runtime.rank.checkpoint.peer_memory import PeerMemoryStore
from shoal.runtime.rank.checkpoint.peers import Peers
from shoal.runtime.rank.checkpoint.reading import fill_parts, find_newest
from shoal.runtime.rank.checkpoint.schedule import SaveSchedule
from shoal.runtime.rank.checkpoint.tiers import Tiers
from shoal.runtime.rank.checkpoint.writing import CheckpointWrite
from shoal.runtime.rank.training_state import Stateful

LEFT_S = 1.0
"""How long the last save of a group that broke may take to notice it; then it is left alone."""


class Checkpoints:
    """Checkpoints of one job. `parts` is what training changes: models, optimizers, schedulers, samplers.

    `keep`: how many stay. `every`: a save each so many steps; unset, by what saves cost and how often the job
    fails; an interval in the job's spec goes before both. `memory`: the newest also in the memory of the
    nodes, each with its neighbour's part, where a restart in place finds it fast. `url`: also there
    (`s3://`, `gs://`, `az://`, `file://`). Used from one thread.
    """

    def __init__(
        self,
        directory: str | None = None,
        *,
        keep: int = 3,
        every: int | None = None,
        memory: bool = False,
        url: str | None = None,
    ) -> None:
        keep = whole_number("keep", keep, 1)
        self._pace = SaveSchedule(None if every is None else whole_number("every", every, 1))
        self._tiers = Tiers(directory, keep=keep, is_in_memory=memory, url=url)
        self._peers: Peers | None = None
        self._fence = Fence()
        self._owners: dict[str, int] | None = None
        self._stage: CheckpointStage | None = None
        self._flight: BackgroundSave | None = None
        self._guarded: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._saved: int | None = None
        self.stalled_s = 0.0
        """How long saves have held training up in this process."""

    def load(self, parts: Mapping[str, Stateful]) -> int | None:
        """Fill the parts from the newest checkpoint that is whole; returns its step, None: there is none.

        Collective, and the same one on every rank, at any world size. Damaged ones are named and passed over.
        `SpecError`: it does not fit these parts, which may be half filled.
        """
        check_parts(parts)
        self.wait()
        peers = self._join()
        newest = find_newest(peers, self._tiers, self._fence)
        if newest is None:
            self._pace.begin(0, 0.0)
            return None
        manifest = fill_parts(peers, parts, newest)
        self._pace.begin(manifest.step, manifest.run_s)
        return manifest.step

    def resume(self, step: int) -> None:
        """Instead of `load`, in a group that has its state from a surviving rank. Collective.

        Ranks connect for the saves to come while all of them are there. Who waits inside of torch for one
        that is lost before it has connected has no connection to be cut, and does not come out.
        """
        self.wait()
        self._join()
        self._pace.resume(step)

    def is_due(self, step: int) -> bool:
        """Whether to save now that this many steps are complete. The same answer on every rank."""
        return self._pace.is_due(step)

    def save(self, parts: Mapping[str, Stateful], step: int) -> None:
        """Begin to save what this many steps have led to. Collective; returns before anything is copied.

        The optimizers among the parts wait before their next step until it is; whatever else changes
        parameters calls `staged` first. A save that fails is said and training goes on. Waits for the one
        before. `StateError`: a later attempt has taken over.
        """
        check_parts(parts)
        step = whole_number("step", step, 0)
        called_at = time.monotonic()
        self.wait()
        began = time.monotonic()
        peers = self._join()
        state = capture(parts)
        if self._owners is None:
            self._owners = assign_owners(peers.gather(replicated_bytes(parts, state)))
        owners, rank = self._owners, peers.rank
        own_state = copy_buffers(
            parts, {key: one for key, one in state.items() if owners.get(key, rank) == rank}
        )
        for optimizer in set(optimizers_of(parts)) - set(self._guarded):
            optimizer.register_step_pre_hook(self._before_step)
            self._guarded.add(optimizer)
        self._pace.set_due(peers.from_rank_zero(lambda: self._pace.plan_next(step)))
        name, decision = CheckpointName(self._fence, step), self._pace.decision
        writing = CheckpointWrite(peers, self._tiers, name, run_s=self._pace.run_s, decision=decision)
        self._stage = self._stage or CheckpointStage()
        self._flight = BackgroundSave(step, self._stage, own_state, writing.run)
        now = time.monotonic()
        self._pace.cost_s = now - began
        self.stalled_s += now - called_at

    def staged(self) -> None:
        """Return when the tensors of the save under way are copied and may be changed."""
        if self._flight is not None:
            began = time.monotonic()
            self._flight.wait_staged()
            waited_s = time.monotonic() - began
            self._pace.cost_s = (self._pace.cost_s or 0.0) + waited_s
            self.stalled_s += waited_s

    def wait(self) -> int | None:
        """Return when no save is under way: the newest step that is committed, None: none by this process.

        `StateError`: a later attempt has taken over, and this one can save nothing any more.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return self._saved
        is_current = self._peers is not None and self._peers.is_current()
        if not flight.wait(None if is_current else LEFT_S):
            # Still stuck with a group that is gone: it keeps its memory, the next save gets its own.
            self._stage = None
            return self._saved
        self._pace.written_s = flight.took_s
        error = flight.error
        if isinstance(error, StateError) and is_current:
            raise error
        if error is None:
            self._saved = flight.step
        elif self._peers is None or self._peers.rank == 0:
            sys.stderr.write(f"shoal: step {flight.step} was not saved: {error}\n")
        return self._saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the last save, unless this rank failed: its peers must not wait for it."""
        if kind is None:
            self.wait()

    def _before_step(self, *_: Any) -> None:
        self.staged()

    def _join(self) -> Peers:
        """The ranks of today's group. The first time, the group shuts out those before it."""
        if self._peers is not None and self._peers.is_current():
            return self._peers
        peers = self._peers = Peers()
        self._owners = None
        claim = peers.from_rank_zero(self._claim)
        if isinstance(claim, ShoalError):
            self._peers = None
            raise claim
        self._fence = claim
        if self._tiers.is_in_peer_memory and (
            problem := PeerMemoryStore(self._tiers.first, peers).claim(claim)
        ):
            self._peers = None
            raise StateError(f"checkpoints cannot be kept in memory: {problem}")
        return peers

    def _claim(self) -> Fence | ShoalError:
        epoch = os.environ.get("SHOAL_EPOCH")
        rendezvous_round = int(os.environ.get("SHOAL_RENDEZVOUS_ROUND", "0"))
        try:
            return self._tiers.claim(
                Fence(epoch=int(epoch), rendezvous_round=rendezvous_round) if epoch else None
            )
        except ShoalError as error:
            return error
        except OSError as error:
            return StateError(f"checkpoints cannot be kept at {error.filename}: {error.strerror}")
