"""What Slurm is told: the arguments of `sbatch`, and the batch script. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping

import msgspec

from shoal.engines.slurm.config import SlurmConfig
from shoal.errors import EngineRefused
from shoal.wire import Order, Summons

END = "SHOAL_SUMMONS_END"
TIME_MARGIN_S = 120.0
"""Slurm's limit comes after ours: the supervisor stops the job, with its grace, and says why."""
EXPORTED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "TZ")


def job_prefix(attempt_id: str) -> str:
    return f"shoal-{attempt_id}."


def job_name(attempt_id: str, incarnation: int) -> str:
    """How we know it again, whatever became of its id, and of its comment, which plugins of sites rewrite."""
    return f"{job_prefix(attempt_id)}{incarnation}"


def comment(attempt_id: str, incarnation: int) -> str:
    return f"shoal attempt {attempt_id} incarnation {incarnation}"


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What `sbatch` is run with, and hence the keeper: nothing of ours, and nothing that people have set to
    change what `sbatch` does.
    """
    return {name: value for name, value in environ.items() if name in (*EXPORTED, "SLURM_CONF")}


def sbatch_arguments(
    config: SlurmConfig, orders: tuple[Order, ...], output: str, longest: str = ""
) -> list[str]:
    """Exactly what the shares were given, on exactly their nodes; `longest`: Slurm's limit for a job that has
    none of its own.

    Not a byte more: a margin for our own processes would leave the last GPU or CPU of a node to nobody.
    """
    first = orders[0]
    if first.gpu_milli != 1000:
        raise EngineRefused(
            f"job {first.job_number} asks for {first.gpu_milli / 1000:g} of a GPU; Slurm gives whole ones",
            hint="set `gpus: 1` in `resources`",
        )
    arguments = [
        "--parsable",
        f"--job-name={job_name(first.attempt_id, first.incarnation)}",
        f"--comment={comment(first.attempt_id, first.incarnation)}",
        f"--nodes={len(orders)}",
        f"--nodelist={','.join(order.node for order in orders)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={num_cpus(orders)}",
        "--no-requeue",
        "--no-kill",
        "--chdir=/",
        "--open-mode=append",
        f"--output={output}",
        # A list of names instead has every node run the user's login shell first, which takes what it takes.
        "--export=ALL",
    ]
    memory = max((order.limits.memory_bytes or 0 for order in orders), default=0)
    num_gpus = max(len(order.gpu_ids) for order in orders)
    given = {
        "mem": f"{max(memory >> 20, 1)}M" if memory else "",
        "gres": f"gpu:{num_gpus}" if num_gpus else "",
        "time": str(math.ceil((first.time_limit_s + first.grace_s + TIME_MARGIN_S) / 60))
        if first.time_limit_s is not None
        else longest,
        "partition": config.partition,
        "account": config.account,
        "qos": config.qos,
    }
    return [*arguments, *(f"--{name}={value}" for name, value in given.items() if value)]


def num_cpus(orders: tuple[Order, ...]) -> int:
    """On each node."""
    return max(math.ceil(order.limits.cpus) for order in orders)


def batch_script(config: SlurmConfig, summons: Summons, num_nodes: int, cpus: int) -> str:
    """The summons goes to every task on its standard input: Slurm shows a job's script to its user alone."""
    told = msgspec.json.encode(summons).decode()
    keeper = [config.python, "-P", "-s", "-m", "shoal.runtime.keep", "$SLURMD_NODENAME"]
    srun = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    # Not every version inherits it; and to which CPUs ranks are bound is not a keeper's affair.
    srun += [f"--cpus-per-task={cpus}", "--cpu-bind=none"]
    srun += ["--kill-on-bad-exit=0", "--no-kill", "--wait=0", "--input=all", "--unbuffered"]
    path = f"export PYTHONPATH={shlex.quote(config.python_path)}\n" if config.python_path else ""
    return (
        "#!/bin/sh\n"
        f"# {comment(summons.attempt_id, summons.incarnation)}\n"
        "umask 077\n"
        "unset SLURM_EXPORT_ENV\n"
        f"{path}"
        f"exec {shlex.join([*srun, *keeper])} <<'{END}'\n"
        f"{told}\n"
        f"{END}\n"
    )
