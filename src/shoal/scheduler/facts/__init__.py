"""Hold what the scheduler is shown, what it answers, and the indexes it keeps up to date.

- `snapshot` is the input: nodes, holdings, candidates. `plan` is the output: starts, promises, evictions,
  explanations. `policy` is what an operator may choose.
- `amounts` turns a request into exact integers: `demand_of(request)` returns the `Demand` that the other
  folders compare.
- `cluster_state` receives every change from the planner and passes it to the indexes: `capacity` (free
  amounts per node, with `gpu_use` for single devices), `order.queue`, `order.project_tree`,
  `order.fair_share`, `placement.power`, `placement.windows` and `preemption.costs`.
"""
