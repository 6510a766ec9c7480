"""What the control plane knows in memory only. After a crash all of it is learned again.

`leases.py` counts silence: a heartbeat costs no write. `queue.py` follows the event log and keeps the
planner's view of jobs current; it starts with run times from `start_predictions.py`, which also remembers
predictions. `planner_input.py` translates records into what the scheduler sees. `supervisor_reports.py` and
`open_drills.py` hold what supervisors repeat with each renewal. `health.py` knows which loops fail, how long
the engine has not answered and which nodes are missing, and has the signals that wake loops. `refusals.py`
counts refused requests until an event reports them.
"""
