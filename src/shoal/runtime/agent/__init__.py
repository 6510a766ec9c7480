"""The node agent: it runs one task on a machine that the control plane reaches only through a cluster.

Slurm or Ray starts `bootstrap` on the node with a `LaunchRequest` on standard input:

    bootstrap             the entry point; it makes a start cheaper and calls `node_agent.main`
    node_agent            fetches the task spec, forks the supervisor, reports its log and its outcome
    control_plane_client  the node agent's requests to the control planes, over TLS
    spool_root            finds or makes the private directory of the node's disk where the task lies
    reaping               run by the cluster after a node agent died: kills what is left and says so

The node agent writes the task spec into a spool, as an engine does on the control plane's own machine, and
the supervisor (`runtime.supervisor`) reads it there.
"""
