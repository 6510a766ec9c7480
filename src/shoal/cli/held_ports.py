"""Keep projects' jobs from answering at the ports of the control plane and the data plane.

A job may bind a port as soon as its daemon ends, and callers would send it their tokens. Where root has
nftables, a rule drops what it answers. The rule outlasts both daemons, and is written again in case a restart
of the machine's firewall has removed it.
"""

from __future__ import annotations

import os
import threading
import time
from urllib.parse import urlsplit

import structlog

from shoal.cli.data_plane_facts import running
from shoal.runtime.confine import firewall
from shoal.settings import Settings

AGAIN_S = 120.0

log = structlog.get_logger()


def start(settings: Settings, listens_at: int) -> None:
    """Hold the ports from a thread for as long as this process lives. `settings`: as they were asked for."""
    if os.geteuid() == 0 and firewall.find_nft() is not None:
        threading.Thread(target=_hold, args=(settings, listens_at), name="held-ports", daemon=True).start()


def _hold(settings: Settings, listens_at: int) -> None:
    problem = ""
    while True:
        try:
            firewall.hold(ports(settings, listens_at))
            problem = ""
        except firewall.FirewallFailed as error:
            if error.message != problem:
                log.warning("ports.not_held", error=error.message)
            problem = error.message
        time.sleep(AGAIN_S)


def ports(settings: Settings, listens_at: int) -> set[int]:
    """Those that callers know: the usual ones, those that were named, and where the data plane listens
    instead. Not one that the kernel chose (`:0`): it may give a job that number, too.
    """
    held = {settings.serve_port, settings.port if settings.port == listens_at else 0}
    found = running(settings.home)
    if settings.serve_port and found is not None:
        held.add(urlsplit(str(found["url"])).port or 0)
    return held - {0}
