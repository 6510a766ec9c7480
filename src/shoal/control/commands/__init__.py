"""Commands: what callers of the API, supervisors and node agents ask the control plane to change or explain.

A route of the API calls one function of one of these files for each request. A change is one transaction with
its event, idempotent by key. `submit.py` accepts a job and hands arrays to `arrays.py`; `jobs.py` stops and
retries jobs, which `job_records.py` finds by what people type. `people.py` and `tokens.py` change users,
projects and tokens. `nodes.py`, `windows.py` and `drills.py` are for operators, and `policy.py` reads the
scheduler's policy. `renewals.py` answers the heartbeats of supervisors; `mailbox.py` answers node agents on
other machines. `explain.py` answers why and when, and `audit.py` proves the log.
"""
