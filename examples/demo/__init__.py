"""`make demo`: a cluster, jobs, kills and recoveries in about a minute, every command shown.

Uses the `shoal` command and the SDK as anybody could. Never touches the user's own cluster.
"""
