"""Where work runs. Each engine starts supervisors on nodes, lists what it started and says which nodes live.

Engines report observations, never our states, and know nothing of jobs, queues or people.
No engine imports another.
"""
