"""Engines of clusters whose nodes are other machines: the part that Slurm and Ray have in common.

`engine.RemoteEngine.submit` stores the task specs of an attempt in the `mailbox`. Then `agent_launcher` has
the cluster start a node agent for each task spec that no process has. The node agent fetches its task spec
over TLS (`mailbox.Mailbox.assign`), runs the supervisor and sends status reports with pieces of the log
(`Mailbox.receive`). `engine.list_owned` asks the cluster for its own view (`cluster_observation`) and
`task_observer` combines that with the reports into observations for the control plane.

`connection` holds what `shoal connect` wrote and how nodes reach the control planes. The subclasses in
`engines/slurm` and `engines/ray` only launch, observe and cancel. This folder imports neither.
"""
