"""Which rank of which job this process is, by the names that only Shoal sets.

A script may unset or change `RANK` and `WORLD_SIZE` before a launcher, because a real launcher sets them
itself. A stand-in that read those names would take a rank of four for the only rank of a job. Then each rank
would start a world of its own, and all of these copies would succeed.
"""

from __future__ import annotations

from . import launchers

SHAPE = ("SHOAL_WORLD_SIZE", "SHOAL_RANKS_PER_NODE", "SHOAL_NUM_NODES")
NUMBERS = ("SHOAL_RANK", "SHOAL_LOCAL_RANK")
BOARD = "SHOAL_BOARD"
"""A spare process has this, and no `NUMBERS` until it takes the place of a rank."""
TORCH = {
    "RANK": "SHOAL_RANK",
    "ROLE_RANK": "SHOAL_RANK",
    "LOCAL_RANK": "SHOAL_LOCAL_RANK",
    "GROUP_RANK": "SHOAL_NODE_RANK",
    "GROUP_WORLD_SIZE": "SHOAL_NUM_NODES",
    "WORLD_SIZE": "SHOAL_WORLD_SIZE",
    "ROLE_WORLD_SIZE": "SHOAL_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "SHOAL_RANKS_PER_NODE",
    "MASTER_ADDR": "SHOAL_MASTER_ADDR",
    "MASTER_PORT": "SHOAL_MASTER_PORT",
}
"""The names that torchrun sets, and Shoal's name for each."""
DEEPSPEED = {
    "LOCAL_SIZE": "SHOAL_RANKS_PER_NODE",
    "CROSS_RANK": "SHOAL_NODE_RANK",
    "CROSS_SIZE": "SHOAL_NUM_NODES",
}
SRUN = {
    "SLURM_PROCID": "SHOAL_RANK",
    "SLURM_LOCALID": "SHOAL_LOCAL_RANK",
    "SLURM_NODEID": "SHOAL_NODE_RANK",
    "SLURM_NTASKS": "SHOAL_WORLD_SIZE",
    "SLURM_NPROCS": "SHOAL_WORLD_SIZE",
    "SLURM_NNODES": "SHOAL_NUM_NODES",
    "SLURM_STEP_NUM_NODES": "SHOAL_NUM_NODES",
}
COMPARED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def require(name: str, environment: dict[str, str]) -> None:
    """Raise `LauncherRefused` if a script has removed or changed the variables by which a launcher knows its
    rank.
    """
    missing = [variable for variable in SHAPE if not launchers.is_number(environment.get(variable))]
    if BOARD not in environment:
        missing += [variable for variable in NUMBERS if not launchers.is_number(environment.get(variable))]
    if missing:
        raise launchers.LauncherRefused(
            f"`{name}` does not know its rank: the script has removed {', '.join(missing)}",
            f"keep the variables SHOAL_... (instead of `env -i`), or start the program without `{name}`",
        )
    world, on_a_node, nodes = (int(environment[variable]) for variable in SHAPE)
    if world != on_a_node * nodes:
        raise launchers.LauncherRefused(
            f"`{name}` finds {world} ranks in SHOAL_WORLD_SIZE, and {on_a_node} on each of {nodes} nodes",
            "leave the variables SHOAL_... as they are",
        )


def require_equal_names(name: str, environment: dict[str, str]) -> None:
    """Raise `LauncherRefused` if torchrun's names, as far as they are set, contradict Shoal's.

    In the only rank of a job they may have any value, because Shoal does not set them there.
    """
    for variable in COMPARED:
        value, expected = environment.get(variable), environment.get(TORCH[variable])
        if environment["SHOAL_WORLD_SIZE"] != "1" and value is not None and value != expected:
            raise launchers.LauncherRefused(
                f"`{name}` finds `{variable}={value}`, and in this rank of the job it is {expected}",
                f"leave `{variable}` as it is, or `unset {variable}`",
            )


def launcher_variables(name: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that this launcher sets for its program: those that a script has removed, too."""
    is_alone = environment["SHOAL_WORLD_SIZE"] == "1"
    if name == "srun":
        return {} if is_alone else _values(SRUN, environment)
    if name == "accelerate-launch" and is_alone:
        return {}  # `accelerate launch` sets none for a single process
    if name == "deepspeed":
        return _values({**TORCH, **DEEPSPEED}, environment)
    return {
        **_values(TORCH, environment),
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": environment.get("SHOAL_ATTEMPT_ID", "shoal"),
        "TORCHELASTIC_RESTART_COUNT": environment.get(
            "TORCHELASTIC_RESTART_COUNT", environment.get("SHOAL_RENDEZVOUS_ROUND", "0")
        ),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _values(names: dict[str, str], environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[ours] for name, ours in names.items() if ours in environment}
