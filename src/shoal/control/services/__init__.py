"""Services: the commands that make, scale and end them, and the loop that keeps their replicas as desired.

`commands.py` changes a service or makes a release, after `release_checks.py` has refused what the cluster
cannot do. `reconcile.py` is the loop: for each service it loads a snapshot (`snapshot.py`), works out the
desired replicas (`desired.py`), and starts, drains and stops replicas in one transaction. `replicas.py` makes
a replica a job and records the status that its supervisor reports. `serving_table.py` then makes the table
for the data planes, and `state.py` publishes it and holds what data planes and supervisors report.

A replica is a job like any other. The rules (how many, which step of a rollout) are in `shoal.serving`, on
plain values; here the decisions are recorded.
"""
