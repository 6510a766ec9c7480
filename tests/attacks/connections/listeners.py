"""Everything of ours that accepts connections: what can reach it, and what bounds it.

A test finds the calls that listen or accept in the source and fails if one has no row here.
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    reached_by: str
    bounded_by: str
    """What ends a connection that makes no valid request, and what bounds their number."""


CLIENTS, NODES, OURS, HELD = "clients", "nodes", "our own processes", "nobody: it is held, and never accepts"
LISTENERS: dict[str, Row] = {
    "api/http/server.py": Row(
        f"{CLIENTS}, {NODES}",
        "BoundedProtocol and ConnectionSlots: tests/attacks/connections/test_connection_states.py",
    ),
    "tls_listener.py": Row(
        f"{CLIENTS}, {NODES}",
        "256 handshakes of 5 s, by address: tests/unit/identity/test_tls_handshakes.py; then the listener's",
    ),
    "serving/plane.py": Row(
        CLIENTS,
        "ConnectionQuota, Downstream: tests/attacks/connections/test_data_plane_states.py, "
        "tests/unit/serving/proxy/test_connection_places.py",
    ),
    "serving/main.py": Row(
        CLIENTS, "the sockets of serving/plane.py, and of Admin: tests/unit/serving/test_admin.py"
    ),
    "cli/control_plane/data_plane.py": Row(HELD, "closed again at once: it only tries the port"),
    "runtime/replica/sidecar_monitor.py": Row(NODES, "the socket of runtime/replica/sidecar_process.py"),
    "runtime/replica/sidecar_process.py": Row(
        NODES,
        "64 strangers by address, of 10 s each; data planes: tests/unit/runtime/replica/test_sidecar.py",
    ),
    "runtime/replica/listeners.py": Row(
        OURS, "a socket in a folder that only the supervisor's user may enter, and the job that it serves"
    ),
    "runtime/standby/process.py": Row(OURS, "a socket in a folder of the supervisor's"),
    "runtime/warm/zygote.py": Row(OURS, "a socket in a folder of the supervisor's"),
    "runtime/warm/mpi_rendezvous.py": Row(
        NODES,
        "64 guests by address, each with 10 s for its proof: tests/unit/runtime/warm/test_mpi_channel.py",
    ),
    "runtime/warm/mpi_host.py": Row(OURS, "a socket in a folder that only the job's user may enter"),
    "runtime/rank/process_group.py": Row(
        NODES,
        "nothing: PyTorch's store has no password. The network rules between projects keep others away, "
        "and docs/guides/confinement.md says from where not",
    ),
    "serving/haproxy/render.py": Row(
        CLIENTS, "HAProxy's own limits, on a socket that serving/main.py opens for it"
    ),
    "engines/ray/head.py": Row(HELD, "it keeps ports free until Ray takes them"),
}
