"""A standby supervisor on each node of several, which takes over when the active supervisor is lost.

1. `monitor` runs in the active supervisor. Once the ranks train, `StandbyMonitor.poll` starts a standby
process and gives it part of the task's memory limit. It ends the standby when the ranks need that memory. 2.
`process` is the standby. It prepares a sandbox and a zygote with the imports of the ranks, then waits. 3. If
the active supervisor dies, an engine connects to the standby's socket and sends a `TakeoverRequest`. The
standby claims the task and becomes its supervisor. 4. `slot` holds what the three share: the standby's
directory, its messages, and `reap`, which removes what a dead standby has left.

A standby runs no code of the program and only makes a restart faster. If it fails, the engine starts a
supervisor in the ordinary way.
"""
