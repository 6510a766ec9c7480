"""One save on its way: copied beside training, then written and committed in the background."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from shoal.runtime.rank.checkpoint.writing import cause

EXIT_S = 5.0
"""A process that ends inside a collective aborts: one that forgot to wait gives its last save so long."""
_flying: set[Flight] = set()


class Stage:
    """Memory that every save is copied into first: allocated once, since fresh pages are what takes time.

    Pinned where there is a device to copy from. Serves one flight at a time.
    """

    def __init__(self) -> None:
        has_device = torch.accelerator.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=torch.cuda.is_available(),
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self._stream = torch.Stream() if has_device else None
        self._device = torch.accelerator.current_device_index() if has_device else None

    def order(self) -> None:
        """Copies come after all that was asked of the device so far. Called in the training thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state in host memory. It stays as it is until the next call."""
        with self._on_stream():
            return cast("dict[str, Any]", self._stager.stage(state))

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None or self._device is None:
            yield
            return
        torch.accelerator.set_device_index(self._device)
        with self._stream:
            yield


class Flight:
    """Begins when made. The thread ends with the process: a rank that fails must not wait for its peers."""

    def __init__(
        self,
        step: int,
        stage: Stage,
        state: dict[str, Any],
        land: Callable[[dict[str, Any] | Exception], None],
    ) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.took_s = 0.0
        self._stage = stage
        self._state = state
        self._land = land
        self._staged, self._done = threading.Event(), threading.Event()
        stage.order()
        _flying.add(self)
        threading.Thread(target=self._run, name=f"checkpoint-{step}", daemon=True).start()

    def wait_staged(self) -> None:
        """Return when the tensors may be changed again."""
        self._staged.wait()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is over, well or not, within that time."""
        return self._done.wait(timeout_s)

    def _run(self) -> None:
        began = time.monotonic()
        try:
            copied = self._copied()
            self._staged.set()
            self._land(copied)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - said by whoever waits
            self.error = cause(error)
        finally:
            self._state = {}
            self.took_s = time.monotonic() - began
            self._staged.set()
            self._done.set()
            _flying.discard(self)

    def _copied(self) -> dict[str, Any] | Exception:
        """What went wrong is told to the other ranks too: they would wait for this one."""
        try:
            return self._stage.copy(self._state)
        except Exception as error:  # noqa: BLE001 - out of memory, a device that is gone
            return error


@atexit.register
def _wait_for_all() -> None:
    until = time.monotonic() + EXIT_S
    for flight in list(_flying):
        flight.wait(max(0.0, until - time.monotonic()))
