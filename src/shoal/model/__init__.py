"""What exists: jobs, attempts, nodes, people; their states, moves and events.

Pure: no clock, no I/O, no randomness. Nothing here knows a database, an engine or HTTP.
"""
