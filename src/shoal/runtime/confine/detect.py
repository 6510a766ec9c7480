"""Detect which confinements work on this machine, by trying them."""

from __future__ import annotations

import os

from shoal.runtime.confine import firewall, resource_limits
from shoal.runtime.confine.sandbox import Sandbox, SandboxFailed

BUBBLEWRAP_PLACES = ("/usr/bin/bwrap", "/usr/local/bin/bwrap", "/bin/bwrap")


def detect() -> tuple[str, ...]:
    """Return the confinements that work here, strongest first, as `shoal nodes` prints them.

    `cgroup2` or `cgroup1` (CPU, memory and process count of the whole task), else `rlimits` and
    `affinity` (each process by itself) · `bubblewrap` (own processes, files and /tmp) · `uid` (another
    user for every project) · `nftables` (no connections between projects). Starts an empty sandbox, which
    takes about 5 ms.
    """
    tried = {"bubblewrap": has_bubblewrap, "nftables": firewall.works}
    return tuple(word for word in candidates() if word not in tried or tried[word]())


def candidates(*, stays: bool = False) -> tuple[str, ...]:
    """Like `detect`, but only find programs, without trying them. `stays`: see `TaskIsolation`."""
    hierarchies = resource_limits.hierarchies_here()
    if resource_limits.usable_v2_base(hierarchies, stays=stays) is not None:
        mechanisms = ["cgroup2"]
    elif resource_limits.usable_v1_bases(hierarchies) is not None:
        mechanisms = ["cgroup1"]
    else:
        mechanisms = ["rlimits", "affinity"]
    if find_bubblewrap() is not None:
        mechanisms.append("bubblewrap")
    if os.geteuid() == 0:
        mechanisms.append("uid")
        if firewall.find_nft() is not None:
            mechanisms.append("nftables")
    return tuple(mechanisms)


def find_bubblewrap() -> str | None:
    """Return the path of bubblewrap, only from system directories, because it may run as root."""
    return next((path for path in BUBBLEWRAP_PLACES if os.access(path, os.X_OK)), None)


def has_bubblewrap() -> bool:
    """Whether a sandbox can be built. bubblewrap may be installed while user namespaces are forbidden."""
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
