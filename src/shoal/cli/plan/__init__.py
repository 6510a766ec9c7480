"""Simulate a cluster: `shoal whatif`, `shoal plan` and `shoal explain-decision`.

`inputs` has the flags that `whatif` and `plan` share and turns them into what `shoal.sim` takes. It reads
this cluster's event log (`read_past`) or a trace, applies the requested changes, and runs the simulations in
processes (`SimulationPool`). `whatif` compares the past with a changed one, `plan` searches for the smallest
cluster that meets a target. `decision` replays recorded decisions of the scheduler from the same log.
"""
