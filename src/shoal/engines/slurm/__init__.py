"""Slurm: one `sbatch` for each attempt, in it one `srun` task for each node, which is a keeper.

Slurm is told what was decided: which nodes, how much of them. It is believed when it explains and never when
it says that something has ended: see `states`. Its ids are used again after a crash of slurmctld, so jobs are
known by their name, which ends with the attempt.
"""

from shoal.engines.slurm.config import SlurmConfig
from shoal.engines.slurm.engine import SlurmEngine

__all__ = ["SlurmConfig", "SlurmEngine"]
