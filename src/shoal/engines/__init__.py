"""Engines: where work runs. Each starts supervisors on nodes, lists what it started and says which nodes
live.

`base` has the contract. `registry.open_engine` imports and opens one of `local`, `slurm` and `ray`; `fake`
is for tests and simulation. Every engine first checks a submission with `refusal`. `remote` is the common
part of `slurm` and `ray`, whose nodes are other machines. `spool_directory` is
the directory in which `local` and `remote` store attempts, `disk` has log pages and work on threads,
`home_records` says which cluster a home uses, and `checkpoint_folder` and `checkpoint_reader` look after
checkpoint directories.

Engines report observations, never Shoal's states, and know nothing of jobs, queues or people. No engine
imports another.
"""
