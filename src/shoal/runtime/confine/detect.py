"""What this machine offers to confine jobs with, found by trying it."""

from __future__ import annotations

import os

from shoal.runtime.confine import cgroup, cgroup1, cgroup2, firewall
from shoal.runtime.confine.sandbox import Sandbox, SandboxFailed

BUBBLEWRAP_PLACES = ("/usr/bin/bwrap", "/usr/local/bin/bwrap", "/bin/bwrap")


def detect() -> tuple[str, ...]:
    """The ways to confine that work here, strongest first, as `shoal nodes` prints them.

    `cgroup2` or `cgroup1` (CPU, memory and process count of the whole share), else `rlimits` and
    `affinity` (each process by itself) · `bubblewrap` (own processes, files and /tmp) · `uid` (another
    user for every project) · `nftables` (no connections between projects). Starts an empty sandbox for an
    instant, about 5 ms.
    """
    tried = {"bubblewrap": has_bubblewrap, "nftables": firewall.works}
    return tuple(word for word in candidates() if word not in tried or tried[word]())


def candidates(*, stays: bool = False) -> tuple[str, ...]:
    """Like `detect`, but programs are only looked for, not tried. `stays`: see `Order.stays_in_cgroup`."""
    found = cgroup.here()
    if cgroup2.usable_base(found, stays=stays) is not None:
        words = ["cgroup2"]
    elif cgroup1.usable_bases(found) is not None:
        words = ["cgroup1"]
    else:
        words = ["rlimits", "affinity"]
    if find_bubblewrap() is not None:
        words.append("bubblewrap")
    if os.geteuid() == 0:
        words.append("uid")
        if firewall.find_nft() is not None:
            words.append("nftables")
    return tuple(words)


def find_bubblewrap() -> str | None:
    """The program, from system directories alone: it may run as root."""
    return next((path for path in BUBBLEWRAP_PLACES if os.access(path, os.X_OK)), None)


def has_bubblewrap() -> bool:
    """Whether a sandbox can be built: the program may be there and user namespaces forbidden."""
    program = find_bubblewrap()
    if program is None:
        return False
    sandbox = Sandbox(program, ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"])
    try:
        sandbox.wait_ready()
    except SandboxFailed:
        return False
    finally:
        sandbox.kill()
        os.waitpid(sandbox.pid, 0)
        sandbox.close()
    return True
