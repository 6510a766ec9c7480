"""Virtual time: jobs of a trace on a cluster that is not there, and what they got.

`twin` moves the clock and lets the production planner decide; a `workload` goes in, made by `from_trace` or
any other source, an `outcome` comes out, and `report`, `compare` and `plot` say what is in it. `loop` and
`references/` are published policies that show the simulator to be right: no part of the product's policies.
"""
