"""The data plane of services: what routes, balances, admits and counts requests, in a process of its own.

Installs without the control plane and keeps serving when that is away. It is told by a `Table` and answers
with a `Report` (`table.py`); what to do about them (replicas, rollouts) are pure decisions here, too, acted
upon by `control`. Refuses to know about jobs, nodes and the store.
"""
