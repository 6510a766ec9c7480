"""The variables that number a rank, in the names of torchrun, Slurm, MPI and Shoal. Pure."""

from __future__ import annotations

OWN_RANK_NAMES = ("SHOAL_RANK", "SHOAL_LOCAL_RANK")
"""Set in every rank, also in the only one of a job."""
RANK_NAMES = ("RANK", "ROLE_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
LOCAL_RANK_NAMES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_NODE_RANK",
    "MPI_LOCALRANKID",
)


def numbers(rank: int, local_rank: int) -> dict[str, str]:
    """Who a rank is, in everybody's words."""
    ours = dict.fromkeys(RANK_NAMES, str(rank))
    own = dict(zip(OWN_RANK_NAMES, (str(rank), str(local_rank)), strict=True))
    return {**ours, **dict.fromkeys(LOCAL_RANK_NAMES, str(local_rank)), **own}
