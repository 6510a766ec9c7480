"""What exists: jobs, attempts, nodes, services, drills and people, with their states and events.

Pure: no clock, no I/O, no randomness. This folder knows no database, no engine and no HTTP.

from_spec     the frozen spec becomes a `ResourceRequest`
job           the job, its dependencies, its retry policy and how it ended
attempt       one try at a job: its state and the tasks that it holds on nodes
moves         `step(attempt, event, now)`: the only way to change an attempt; `diagram` prints the table
evidence      what is known of a task's end, and what that allows; `evidence_page` prints the table
retry         after an attempt has ended: the next attempt, or the job's outcome
node, people  the other records that the store keeps; `service` holds releases, rollouts and replicas
drill         a fault that a person asked for, and its report; `drill_measures` holds its measures
drill_control the report of a drill that kills the control plane
"""
