"""`shoal connect`: choose which cluster this home's control plane uses from its next start on.

`commands` has `slurm`, `ray` and `local`. Each refuses while a control plane runs here, checks the paths that
nodes will use (`checks.node_paths`), asks the cluster for its nodes, and refuses to leave a cluster where
jobs of this home may still run (`checks.refuse_other_cluster`). It then writes the engine's config.
`slurm` has what is asked of Slurm and printed: accounts, partitions, and under which user jobs would run.
"""
