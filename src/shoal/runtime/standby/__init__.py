"""A supervisor in waiting for each node of several: what takes over when the one that works is lost.

`minder` is the part of the supervisor that has one, `process` is the waiting one itself, `place` is what they
and the engine know of each other. A standby only makes a start quicker: whatever is wrong with it, the engine
starts a supervisor as it starts any other. It runs nothing of the program.
"""
