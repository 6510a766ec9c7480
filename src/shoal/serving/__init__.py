"""The data plane of services: it routes, balances, admits and counts HTTP requests, in its own processes.

The control plane sends a `ServingTable`; a data plane answers with a `ServingReport` each second
(`table.py`). `main.py` starts everything: `processes.py` keeps several workers on one port, `feed.py` reads
tables through `leader_client.py`, `plane.py` holds the state of one process, `housekeeping.py` enforces its
deadlines, and `report.py` makes reports and metrics. A request enters at `proxy/`, which asks `admission/`
for the service and the caller, and `balance/` for the replica. `haproxy/` serves the same tables with
HAProxy instead.

`scaling/` decides on replicas and rollouts with pure functions; `control` acts on the decisions. The data
plane installs without the control plane and keeps serving while that is away. It knows no jobs, no nodes and
no store.
"""
