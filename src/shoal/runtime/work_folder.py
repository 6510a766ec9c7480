"""What a share says of its working folder: what is lost of it at the end, and what a program missed there."""

from __future__ import annotations

from shoal.runtime import missing_files, spool, written
from shoal.runtime.groundwork import begins_in
from shoal.wire import Order, Written


class WorkFolder:
    """Of one share. `begin` when its ranks begin; `lost` when nothing of it runs any more."""

    def __init__(self, order: Order, share: spool.Share) -> None:
        self._order = order
        self._share = share
        self._mark: written.Mark | None = None

    def begin(self) -> None:
        """What is newer from now on is the ranks' own."""
        self._mark = written.mark(self._share.directory)

    def lost(self) -> Written | None:
        """What they wrote and nobody keeps. A server's files are no results, a shared folder stays."""
        is_kept = self._order.has_shared_folder or self._order.probe is not None
        if self._mark is None or is_kept:
            return None
        return written.count(self._share.work, self._mark)

    def told(self, message: str, words: str) -> str:
        """The message, with why a program did not find a file, if its last words say that it did not."""
        missed = missing_files.explain(words, self._order, begins_in(self._order, self._share.work))
        return f"{message}; {missed}" if missed else message
