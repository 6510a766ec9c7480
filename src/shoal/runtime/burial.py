"""See that nothing of a share runs whose keeper is gone.

    python -m shoal.runtime.burial SPOOL ATTEMPT NODE INCARNATION

For whoever knows that the keeper is dead. A supervisor without its keeper has nobody to hand
its outcome to, so it is ended too. Exit code 0 is evidence: nothing of the share runs here, or will.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from shoal.clock import BootClock
from shoal.runtime import places, spool, tree
from shoal.wire import Fetch

TIMEOUT_S = 40.0
TURN_S = 0.1
PAUSE_S = 5.0
"""Before it is said that nobody can say: who asks again at once would hear the same."""
OVER, NOT_YET, LEFT, USAGE = 0, 1, 2, 64


def main(arguments: list[str]) -> int:
    """0: nothing of it runs. 1: nobody can say. 2: something did not die. Ask again."""
    if len(arguments) != 4 or not arguments[3].isdigit():
        sys.stderr.write("usage: python -m shoal.runtime.burial SPOOL ATTEMPT NODE INCARNATION\n")
        return USAGE
    root, attempt_id, node, incarnation = arguments
    asked = Fetch(attempt_id=attempt_id, node=node, incarnation=int(incarnation), process="")
    found = max((_bury_below(one, asked) for one in places.roots_of(root)), default=OVER)
    if found == NOT_YET:
        time.sleep(PAUSE_S)
    return found


def _bury_below(root: str, asked: Fetch) -> int:
    """What lies where others could have laid it is no word of ours, and nobody is killed by it. One root that
    cannot be looked into keeps nobody from the others.
    """
    share = spool.Share(places.place_of(root, asked))
    try:
        if not spool.is_there(share):
            return OVER
        if foreign := places.foreign_in(root, share.directory):
            told = (
                f"others than user {os.getuid()} could change {foreign}; if it is yours: chmod go-w {foreign}"
            )
            sys.stderr.write(f"shoal burial: {share.directory}: {told}\n")
            return NOT_YET
        return bury(share)
    except OSError as error:
        sys.stderr.write(f"shoal burial: {share.directory}: {error}\n")
        return NOT_YET


def bury(share: spool.Share, timeout_s: float = TIMEOUT_S) -> int:
    """Kill its supervisor and what that left. A share that was never prepared, or is removed, is over, and
    nobody can tell these from one whose whole directory was taken away; of one that has lost files nobody can
    say so.
    """
    clock = BootClock()
    deadline, told = clock.monotonic() + timeout_s, "its order is gone"
    while spool.is_there(share):
        is_left = True
        lock = spool.take_lock(share)
        if lock is None:
            # By its claim: one that a keeper forked has no room for its name on its command line.
            if not spool.signal_supervisor(share, signal.SIGKILL):
                spool.kill_supervisors(share)
        else:
            try:
                claimed = spool.read_claim(share)
                # A supervisor that is still on its way finds it claimed, and ends.
                spool.claim(share, clock.now())
                if spool.kill_leftovers(share.directory):
                    told, is_left = _doubts(share, claimed), False
                    if not told:
                        return OVER
                elif spool.is_copied(share):
                    told, is_left = "it was copied, and the processes of the original run", False
                else:
                    is_left = spool.read_order(share) is not None  # else nobody knows what to look for
            finally:
                os.close(lock)
        if clock.monotonic() >= deadline:
            told = "something of it does not die" if is_left else told
            sys.stderr.write(f"shoal burial: {share.directory}: {told}\n")
            return LEFT if is_left else NOT_YET
        time.sleep(TURN_S)
    return OVER


def _doubts(share: spool.Share, claimed: spool.Claim | None) -> str:
    """Why nobody can say yet that nothing of it runs; empty: all of it was found.

    What its ranks had started is nobody's child any more, and may have overwritten its marks, or hide them.
    Whoever may be such a one is neither killed nor passed over.
    """
    if claimed is None or claimed.pid == os.getpid():
        return ""  # nobody began it
    found = tree.doubtful(os.path.realpath(share.work), claimed.start_ticks)
    return f"processes {sorted(found)} may be of it" if found else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
