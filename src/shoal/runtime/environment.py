"""What a rank finds in its environment: torchrun's names, Slurm's, MPI's, JAX's and Shoal's own.

The only rank of a job finds none of the names by which libraries notice that they are one of several
processes: only a launcher in its `run` sets them.

Pure. Later layers win: clean base, the job's own variables and secrets, ours, and last the devices, which
no job can choose for itself. Nothing of the supervisor's environment leaks in.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.runtime import caches, flight_recorder
from shoal.runtime.rank_names import OWN_RANK_NAMES, numbers
from shoal.runtime.warm import mpirun
from shoal.wire import Credentials, Order

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEVICE_NAMES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Set by us whatever the job says; other names of this kind can only narrow these."""

_NO_MPI = {
    **dict.fromkeys(("OMPI_MCA_op", "HYDRA_RMK", "HYDRA_LAUNCHER"), mpirun.ALONE),
    "PMI_PORT": "127.0.0.1:1",
}
"""Has MPI fail where it begins, in Open MPI by a component that does not exist, in MPICH by a process manager
that does not answer. A rank that begins MPI by itself would be a world of its own, and so would the ranks of
a real `mpirun` that each rank started: as many copies of the program, which all end well.
"""
_NO_MPI_EITHER = {"OMPI_MCA_coll": mpirun.ALONE}
"""The same once more, for a script that sets the first name by itself (`OMPI_MCA_op=^avx`). A job's own value
stays.
"""


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One group of ranks of an attempt: those that find each other. A restart in place makes the next."""

    number: int = 0
    master_port: int = 0
    """Where it meets; 0: not known yet."""


def first_generation(order: Order) -> Generation:
    """The group that a share begins with. One that replaces a lost share was in none yet: it waits for the
    next, and where that meets is told to it.
    """
    if order.incarnation == 0:
        return Generation(master_port=order.master_port)
    return Generation(number=order.incarnation - 1)


def rank_environment(
    order: Order,
    local_rank: int | None,
    generation: Generation,
    *,
    work: str,
    path: str = DEFAULT_PATH,
    credentials: Credentials,
    network: Mapping[str, str],
    service: Mapping[str, str],
    cache: str | None = None,
    start: str | None = None,
) -> dict[str, str]:
    """The whole environment of one rank. `local_rank` counts the ranks of this node from 0; None: of one that
    waits to be a rank, which has no number yet. `network`: what is known of it here; the job may say more.
    `service`: what a server is told that is a replica of one. `cache`: where the project's caches are.
    `start`: the folder with the stand-ins for launchers and with the start hook, which go before whatever the
    job puts on these paths.
    """
    threads = max(1, int(order.limits.cpus / order.ranks_per_node))
    is_alone = order.world_size == 1
    found = {
        **_base(order, work, path),
        "OMP_NUM_THREADS": str(threads),
        **network,
        **caches.variables(cache, {**order.env, **credentials.secrets}),
        **(flight_recorder.variables(work) if order.gpu_ids and not order.are_gpus_simulated else {}),
        **({} if is_alone or order.may_split_world else _NO_MPI_EITHER),
        **order.env,
        **credentials.secrets,
        **({} if is_alone else _torchrun(order, generation)),
        **_slurm(order, work),
        **({} if is_alone else {**_slurm_step(order), **_mpi(order)}),
        # With either of them Open MPI takes itself for a task of `srun`, and finds no such step.
        **(
            {}
            if is_alone
            else {"SLURM_JOBID": str(order.job_number), "SLURM_NODELIST": ",".join(order.nodes)}
        ),
        **({} if is_alone else _jax(order, local_rank, generation)),
        **(_numbers(order, local_rank) if local_rank is not None else {}),
        **_shoal(order, credentials),
        **_group(order, generation),
        **service,
        **_devices(order),
    }
    return found if start is None else {**found, **_in_front(found, start)}


def own_path(order: Order, path: str) -> str:
    """The PATH that a rank would have without Shoal's stand-ins. `path`: that of the node."""
    return order.env.get("PATH") or path


def _in_front(found: Mapping[str, str], start: str) -> dict[str, str]:
    values = {
        "PATH": f"{start}/bin:{found['PATH']}",
        "PYTHONPATH": ":".join(filter(None, (f"{start}/hook", found.get("PYTHONPATH")))),
        "BASH_ENV": f"{start}/bash_env",
    }
    if found.get("BASH_ENV"):
        values["SHOAL_BASH_ENV"] = found["BASH_ENV"]
    return values


def setup_environment(
    order: Order,
    *,
    work: str,
    path: str = DEFAULT_PATH,
    credentials: Credentials,
    cache: str | None = None,
) -> dict[str, str]:
    """The environment of `setup`, which runs once on every node before its ranks and has no rank."""
    return {
        **_base(order, work, path),
        **caches.variables(cache, {**order.env, **credentials.secrets}),
        **order.env,
        **credentials.secrets,
        **_shoal(order, credentials),
        "GROUP_RANK": str(order.node_rank),
        "SHOAL_GENERATION": str(order.incarnation),  # a share in place of a lost one is set up anew
        "SLURM_NODEID": str(order.node_rank),
        "SLURM_JOB_ID": str(order.job_number),
        **_devices(order),
    }


def _base(order: Order, work: str, path: str) -> dict[str, str]:
    name = f"shoal-{order.project}"
    return {
        "PATH": path,
        "HOME": work,
        "PWD": work,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "USER": name,
        "LOGNAME": name,
        "TMPDIR": "/tmp",  # noqa: S108 - private to the share inside the sandbox
        # Its output is a pipe, where Python would keep 8 KiB back until the program ends.
        "PYTHONUNBUFFERED": "1",
    }


def _numbers(order: Order, local_rank: int) -> dict[str, str]:
    found = numbers(order.node_rank * order.ranks_per_node + local_rank, local_rank)
    return found if order.world_size > 1 else {name: found[name] for name in OWN_RANK_NAMES}


def _group(order: Order, generation: Generation) -> dict[str, str]:
    """What torchrun's names say, in names that no library looks for."""
    return {
        "SHOAL_GENERATION": str(generation.number),
        "SHOAL_WORLD_SIZE": str(order.world_size),
        "SHOAL_RANKS_PER_NODE": str(order.ranks_per_node),
        "SHOAL_NUM_NODES": str(len(order.nodes)),
        "SHOAL_MASTER_ADDR": order.master_addr,
        "SHOAL_MASTER_PORT": str(generation.master_port),
    }


def _torchrun(order: Order, generation: Generation) -> dict[str, str]:
    world = str(order.world_size)
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(order.ranks_per_node),
        "GROUP_RANK": str(order.node_rank),
        "GROUP_WORLD_SIZE": str(len(order.nodes)),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": order.master_addr,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RUN_ID": order.attempt_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, order.epoch - 1) + generation.number),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # No agent serves a store at MASTER_PORT: rank 0 must open it itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _slurm(order: Order, work: str) -> dict[str, str]:
    nodes = len(order.nodes)
    node_list = ",".join(order.nodes)
    number = str(order.job_number)
    cpus = str(max(1, int(order.limits.cpus)))
    values = {
        "SLURM_NODEID": str(order.node_rank),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": node_list,
        "SLURMD_NODENAME": order.node,
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NAME": order.job_name,
        "SLURM_JOB_ACCOUNT": order.project,
        "SLURM_CLUSTER_NAME": "shoal",
        "SLURM_SUBMIT_DIR": work,
        "SLURM_CPUS_ON_NODE": cpus,
        "SLURM_JOB_CPUS_PER_NODE": cpus if nodes == 1 else f"{cpus}(x{nodes})",
        "SLURM_GPUS_ON_NODE": str(len(order.gpu_ids)),
        "SLURM_RESTART_COUNT": str(max(0, order.epoch - 1)),
    }
    if order.limits.memory_bytes is not None:
        values["SLURM_MEM_PER_NODE"] = str(order.limits.memory_bytes >> 20)
    if order.array_index is not None:
        values["SLURM_ARRAY_TASK_ID"] = str(order.array_index)
        values["SLURM_ARRAY_TASK_COUNT"] = str(order.array_size or 1)
    return values


def _slurm_step(order: Order) -> dict[str, str]:
    """What `srun` says to the tasks of a step: by these names programs take themselves for one of several."""
    nodes, per_node = len(order.nodes), str(order.ranks_per_node)
    return {
        "SLURM_NTASKS": str(order.world_size),
        "SLURM_NPROCS": str(order.world_size),
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": ",".join(order.nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_LAUNCH_NODE_IPADDR": order.master_addr,
    }


def _mpi(order: Order) -> dict[str, str]:
    """What programs read that are usually behind `mpirun` (Open MPI, then MPICH and Intel). A world of MPI
    itself comes from the real `mpirun` alone, which says all of this anew (`warm/mpi_rank`).
    """
    return {
        **(_NO_MPI if order.world_size > 1 and not order.may_split_world else {}),
        # JAX 0.11 takes these names without an old version for Open MPI 5, and would call MPI.
        "OMPI_VERSION": "4.1",
        "OMPI_COMM_WORLD_SIZE": str(order.world_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(order.ranks_per_node),
        "PMI_SIZE": str(order.world_size),
        "MPI_LOCALNRANKS": str(order.ranks_per_node),
        # DeepSpeed's launcher, and Horovod before it, say the same in these words.
        "LOCAL_SIZE": str(order.ranks_per_node),
        "CROSS_RANK": str(order.node_rank),
        "CROSS_SIZE": str(len(order.nodes)),
    }


def _jax(order: Order, local_rank: int | None, generation: Generation) -> dict[str, str]:
    """`jax.distributed.initialize()` reads the address here and takes the numbers from Slurm's names.

    It would give each process one device, the one of its local number: each gets its part of them.
    """
    address = f"[{order.master_addr}]" if ":" in order.master_addr else order.master_addr
    values = {"JAX_COORDINATOR_ADDRESS": f"{address}:{generation.master_port}"}
    each, rest = divmod(len(order.gpu_ids), order.ranks_per_node)
    if local_rank is not None and each > 0 and rest == 0 and not order.are_gpus_simulated:
        mine = range(local_rank * each, (local_rank + 1) * each)
        values["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, mine))
    return values


def _shoal(order: Order, credentials: Credentials) -> dict[str, str]:
    values = {
        "SHOAL_JOB_ID": order.job_id,
        "SHOAL_JOB_NUMBER": str(order.job_number),
        "SHOAL_ATTEMPT_ID": order.attempt_id,
        "SHOAL_EPOCH": str(order.epoch),
        "SHOAL_NODE": order.node,
        "SHOAL_NODE_RANK": str(order.node_rank),
        "SHOAL_PROJECT": order.project,
        "SHOAL_GPUS": ",".join(map(str, order.gpu_ids)),
    }
    if order.gpu_milli < 1000:
        values["SHOAL_GPU_SHARE"] = f"{order.gpu_milli / 1000:g}"
    if order.array_index is not None:
        values["SHOAL_ARRAY_INDEX"] = str(order.array_index)
    if order.checkpoint_dir is not None:
        values["SHOAL_CHECKPOINT_DIR"] = order.checkpoint_dir
    if order.model_dir is not None:
        values["SHOAL_MODEL_DIR"] = order.model_dir
    if order.checkpoint_interval_s is not None:
        values["SHOAL_CHECKPOINT_INTERVAL_S"] = f"{order.checkpoint_interval_s:g}"
    if order.control_url is not None:
        values["SHOAL_URL"] = ",".join(order.control_urls) or order.control_url
    if credentials.job_token is not None:
        values["SHOAL_TOKEN"] = credentials.job_token
    return values


def _devices(order: Order) -> dict[str, str]:
    """Every rank sees all GPUs of its share, as under torchrun, and chooses its own by LOCAL_RANK."""
    uuids = [gpu.uuid for gpu in order.gpus]
    # CUDA may count in another order than the driver: only a UUID, or PCI order, names the device meant.
    names = uuids if all(uuids) and len(uuids) == len(order.gpu_ids) else [str(i) for i in order.gpu_ids]
    # A simulated GPU must never name a real one of the machine it is simulated on.
    visible = "" if order.are_gpus_simulated else ",".join(names)
    return {**dict.fromkeys(DEVICE_NAMES, visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
