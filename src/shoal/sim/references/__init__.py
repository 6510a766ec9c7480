"""Published policies, kept to show that the simulator is right: `make yardsticks` compares them with their
papers.

Users cannot choose them. `backfilling` and `virtual_clusters` decide for `sim.loop`; `pod_packing` and
`fragmentation` fill nodes without time.
"""
