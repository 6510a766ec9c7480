"""Slurm: one `sbatch` for each attempt, in it one `srun` task for each node, which is a node agent.

`engine.SlurmEngine` chooses a partition (`partitions`), renders the job (`render`) and submits it through
`transport`: Slurm's commands (`client`, `command_runner`, `parse`) or slurmrestd (`rest`, `rest_request`,
`rest_parse`). Both return jobs and nodes, which `states` and `nodes` turn into observations. `shared_files`
has the folders of owners and the output files; `config` is what `shoal connect slurm` wrote.

Slurm gets what was decided: which nodes, and how much of them. It is trusted when it explains, and never
when it says that a task has ended: see `states`. It reuses its ids after a crash of slurmctld, so jobs are
identified by their name, which ends with the attempt and the replacement number.
"""

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine

__all__ = ["SlurmConfig", "SlurmEngine"]
