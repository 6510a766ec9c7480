"""What the control plane knows in memory only. After a crash all of it is learned again.

`running.py` remembers attempts that hold resources, and forgets them in one place. Each has one object in
`attempt_table.py`. `leases.py` counts silence: a heartbeat costs no write. `supervisor_reports.py`,
`replica_reports.py` and `open_drills.py` have what supervisors repeat with each renewal. `queue.py` follows
the event log and keeps the planner's view of jobs current; it starts with run times from
`start_predictions.py`, which also remembers predictions. `planner_input.py` translates records into what the
scheduler sees. `health.py` knows which loops fail, how long the engine has not answered and which nodes are
missing. `signals.py` wakes loops and streams. `refusals.py` counts refused requests until an event reports
them.
"""
