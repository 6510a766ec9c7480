"""A Slurm cluster out of bare machines: what it should be, what each machine is, and the steps between.

Here live the inventory, the facts machines tell, the files they get (`render`), the ordered steps (`steps`,
`leaving`) and what runs them over SSH (`ssh`, `run`). Planning is pure: the same inventory and facts give
the same steps, and a dry run prints them. What does not live here: jobs, and how Shoal talks to the Slurm
that was made.
"""
