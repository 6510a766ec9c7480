"""Choose running attempts to stop, so that another attempt can start or the same one can grow.

- The cycle calls `preempt.Preemption.make_room` for a candidate that may evict.
- `rights` says which attempts the candidate may evict and on which ground, and counts projects as if the
  chosen attempts had stopped.
- `costs` indexes running attempts by the work that stopping them loses.
- `options` computes for single nodes which attempts must stop there, with `freed_capacity` for what each node
  then has free.
- `victims` picks the nodes to evaluate and the set of attempts that loses least.
- `growth` is separate: while no job that could run waits, it chooses an elastic attempt to restart on more
  nodes.
"""
