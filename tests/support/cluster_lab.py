"""What laboratories have in common: a real cluster on this machine, each node in a network of its own."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from tests.support.networks import Networks
from tests.support.patience import pause_s

POLL_S = 0.05


class ClusterLab(Networks, ABC):
    """Blocking. `up` once, `down` at the end, whatever happened in between."""

    engine: str
    """As `shoal connect` calls it."""
    start_s = 60.0
    """How long a daemon may take to begin."""
    variables: dict[str, str]
    """With which its commands find it."""

    @property
    def nodes_python(self) -> str:
        """The Python with Shoal in it, as nodes see it."""
        return sys.executable

    @abstractmethod
    def up(self) -> None: ...

    @abstractmethod
    def down(self) -> None:
        """End everything. May be repeated, and comes after anything that failed."""

    @abstractmethod
    def connect_words(self) -> tuple[str, ...]:
        """How `shoal connect` is told of this very cluster."""

    @abstractmethod
    def start_node(self, name: str) -> None:
        """Its daemon, whatever became of the one before."""

    @abstractmethod
    def kill_daemon(self, name: str) -> None:
        """The daemon alone: what it started may run on."""

    @abstractmethod
    def crash_node(self, name: str) -> None:
        """Everything in the node's network at once, as by a power cut."""

    @abstractmethod
    def give_up(self, name: str) -> None:
        """The cluster is told, if it has to be, that the node has crashed."""

    @abstractmethod
    def is_own(self, pid: int) -> bool:
        """Whether the process is the cluster's, and not Shoal's or a job's."""

    @abstractmethod
    def told(self) -> str:
        """The last words of everybody."""

    def mend(self) -> None:
        """What the site's service manager does for daemons that have ended."""
        return

    @contextlib.contextmanager
    def minded(self) -> Iterator[None]:
        """Mended again and again meanwhile, by somebody else."""
        is_over = threading.Event()

        def mind() -> None:
            while not is_over.wait(1.0):
                try:
                    self.mend()
                except AssertionError as error:  # it was cut off again before it had begun
                    print(f"  not mended: {str(error).splitlines()[0]}", flush=True)

        minder = threading.Thread(target=mind)
        minder.start()
        try:
            yield
        finally:
            is_over.set()
            minder.join()

    def until(self, is_so: Callable[[], bool], what: str, within_s: float | None = None) -> None:
        within_s = within_s or self.start_s
        since = time.monotonic()
        while not is_so():
            assert time.monotonic() < since + within_s, f"not within {within_s:g} s: {what}\n{self.told()}"
            time.sleep(pause_s(since))
