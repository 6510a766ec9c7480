"""A cluster's own event log, read as what its scheduler was told and what it decided.

`facts` turns events into facts. `replay` makes the recorded decisions again with the production planner.
`past` turns the facts into a workload for the twin, and `losses` measures how often nodes failed.
"""
