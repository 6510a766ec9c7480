"""One save on its way: copied beside training, then written and committed in the background."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from shoal.runtime.rank.checkpoint.parts import FlatState
from shoal.runtime.rank.checkpoint.writing import root_cause

EXIT_S = 5.0
"""How long a process that did not wait gives its last save at exit. A process that ends in a collective
aborts."""
_under_way: set[BackgroundSave] = set()


class CheckpointStage:
    """Memory that every save is copied into first: allocated once, since fresh pages are what takes time.

    Pinned where there is a device to copy from. Serves one flight at a time.
    """

    def __init__(self) -> None:
        has_device = torch.accelerator.is_available()
        self._stream = torch.Stream() if has_device else None
        self._device = torch.accelerator.current_device_index() if has_device else None
        self._held: dict[str, torch.Tensor] = {}

    def wait_for_device(self) -> None:
        """Copies come after all that was asked of the device so far. Called in the training thread."""
        if self._stream is not None:
            self._stream.wait_stream(torch.accelerator.current_stream())

    @torch.no_grad()
    def copy(self, state: FlatState) -> FlatState:
        """The state in host memory. It stays as it is until the next call."""
        with self._on_stream():
            copied = {key: self._copy_of(key, value) for key, value in state.items()}
        if self._stream is not None:
            self._stream.synchronize()
        return copied

    def _copy_of(self, key: str, value: object) -> object:
        """A shard of a DTensor is copied as what it is: the same place in the same whole."""
        if not isinstance(value, torch.Tensor):
            return value  # bytes
        if not isinstance(value, DTensor):
            return self._host(key, value)
        names, context = value.__tensor_flatten__()  # type: ignore[no-untyped-call]
        inner = {name: getattr(value, name) for name in names}
        inner["_local_tensor"] = self._host(key, value.to_local())
        return DTensor.__tensor_unflatten__(  # type: ignore[no-untyped-call]
            inner, context, value.shape, value.stride()
        )

    def _host(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._held.get(key)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            is_pinned = tensor.device.type == "cuda"
            held = self._held[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_pinned)
        return held.copy_(tensor, non_blocking=True)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None or self._device is None:
            yield
            return
        torch.accelerator.set_device_index(self._device)
        with self._stream:
            yield


class BackgroundSave:
    """Begins when made. The thread ends with the process: a rank that fails must not wait for its peers."""

    def __init__(
        self,
        step: int,
        stage: CheckpointStage,
        state: dict[str, Any],
        write: Callable[[dict[str, Any] | Exception], None],
    ) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.took_s = 0.0
        self._stage = stage
        self._state = state
        self._land = write
        self._staged, self._done = threading.Event(), threading.Event()
        stage.wait_for_device()
        _under_way.add(self)
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
        except (Exception, CheckpointException) as error:  # noqa: BLE001 - `wait` raises it
            self.error = root_cause(error)
        finally:
            self._state = {}
            self.took_s = time.monotonic() - began
            self._staged.set()
            self._done.set()
            _under_way.discard(self)

    def _copied(self) -> dict[str, Any] | Exception:
        """What went wrong is told to the other ranks too: they would wait for this one."""
        try:
            return self._stage.copy(self._state)
        except Exception as error:  # noqa: BLE001 - out of memory, a device that is gone
            return error


@atexit.register
def _wait_for_all() -> None:
    until = time.monotonic() + EXIT_S
    for flight in list(_under_way):
        flight.wait(max(0.0, until - time.monotonic()))
