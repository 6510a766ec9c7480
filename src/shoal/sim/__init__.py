"""Simulation: the jobs of a trace or of a recorded past, on a cluster in virtual time.

traces/, from_trace       a log in a public format becomes a `workload`
history/                  a cluster's own event log becomes facts, recorded decisions, or a workload
workload_changes          what if: more nodes, other quotas, more jobs; `cluster_shapes` parses `8xH100:8`
twin                      moves the clock and lets the production planner decide; `assumptions` are its models
scenario                  everything that decides one simulation, for other processes; `sizing` searches with
it
report, fairness          the outcome in numbers; `compare` and `plot` show two of them
loop, references/         published policies that show that the simulator is right; users cannot choose them
"""
