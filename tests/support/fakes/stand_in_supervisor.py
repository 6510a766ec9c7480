"""A supervisor that misbehaves on request: what a share's `run` says is what goes wrong.

Keeps the spool's protocol up to the claim, so that the engine's answer to bad endings can be tested.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from shoal.runtime.files import spool


def main() -> None:
    share = spool.SpoolTask(sys.argv[1])
    order = spool.read_task_spec(share)
    assert order is not None
    print("credentials:", len(sys.stdin.read()), flush=True)
    if order.program.run == "never claims":
        sys.exit(3)
    if order.program.run == "hangs":
        time.sleep(1000)
    if spool.take_lock(share) is None or not spool.claim(share, time.time()):
        sys.exit(4)
    if order.program.run == "is deaf":  # before anybody is told that it started
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    marks = {
        "SHOAL_ATTEMPT_ID": order.identity.attempt_id,
        "SHOAL_NODE": order.identity.node,
        "PATH": os.environ["PATH"],
    }
    rank = subprocess.Popen(["sleep", "1000"], env=marks, start_new_session=True)
    spool.write_started(share, spool.RanksStarted(at=time.time(), pids=(rank.pid,)))
    if order.program.run == "dies":
        print("goodbye", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


main()
