"""`shoal cluster`: create and maintain a Slurm cluster. This package prints; `shoal.cluster` does the work.

`commands` has the subcommands. Each takes its inventory from `selection`, which reads the saved one or builds
one from flags and locks out a second command. `commands.ClusterOperation` opens the SSH connections, runs one
function of `shoal.cluster.operations`, and saves the inventory that it returns. `report` turns outcomes of
steps into lines and JSON. At the end, `connection` connects this home's Shoal to the new Slurm, or has it
forget nodes that were removed.
"""
