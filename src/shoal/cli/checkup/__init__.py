"""`shoal doctor`: checks of this machine and of the server, each with a hint of what to type.

`doctor.doctor` calls the checks of `machine.MACHINE_CHECKS`, which need no server, and then those of
`server.SERVER_CHECKS`. Each check is a function that returns a `machine.Finding`: a level, a sentence and a
hint. A check that raises becomes a finding, too. `doctor.finding_lines` prints them.
"""
