"""Make a Slurm cluster out of bare machines: its inventory, what each machine is, and the steps between.

`operations` has the five things people do: create, add, remove, upgrade, destroy. Each opens the machines of
the `inventory` through a `session`, which connects over `ssh` and has every machine report its `facts`.
`preflight` says which machines do not fit. `steps.plan` then turns inventory and facts into ordered steps:
scripts from `shell`, `apt` and `prerequisites`, files from `render`, and the `node_archive` of Shoal.
`teardown` has the steps by which a machine leaves. The session applies the steps, stage by stage on all
machines at once.

Planning is pure: the same inventory and facts give the same steps, and a dry run prints them. Jobs, and how
Shoal talks to the new Slurm, are elsewhere.
"""
