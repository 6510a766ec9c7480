"""How many replicas of which release a service should have. Pure; `control` calls these functions and acts.

`traffic.py` adds up the reports of all data planes, second by second. From its samples, `autoscaler.py`
decides how many replicas a service should have. While a new release replaces an old one, `rollout.py`
divides that number between the two and judges the new one by its errors and latency. `replica_steps.py`
compares the result with the replicas that exist and returns which to start, drain and stop.
"""
