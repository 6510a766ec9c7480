"""The control loops: each reads what is recorded, decides, and records. Any of them may be killed and run
again.

`runner.py` starts them and runs a loop again after an error. `place.py` plans: it reads the changes since its
last cycle, calls the planner, and records starts, evictions and the decision itself (`decision.py`).
`launch.py` hands placed attempts to the engine. `watch.py` compares what the engine sees with the records and
feeds the differences in as events. If a node lost its task, `replace.py` starts the task again or ends the
attempt. `heal.py` lets `node_refresh.py` update the list of nodes, then moves work off drained and dead
nodes. `drill_watch.py` judges open drills, `anchor.py` copies the end of the log outside the database,
`clean.py` removes old data, `project_usage.py` writes fair-share usage down, and `leadership.py` keeps the
lead among several control planes.
"""
