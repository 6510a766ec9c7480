"""The environment of a rank: the names of torchrun, Slurm, MPI and JAX, and Shoal's own.

The only rank of a job gets none of the names by which libraries notice that they are one of several
processes. Only a launcher in its `run` sets them.

Pure. Later layers win: a clean base, the job's own variables and secrets, Shoal's, and last the devices,
which no job can choose for itself. Nothing of the supervisor's environment leaks in.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shoal.runtime.files import caches
from shoal.runtime.rank.board import OWN_RANK_NAMES, rank_variables
from shoal.runtime.supervisor import flight_recorder
from shoal.runtime.warm import mpirun
from shoal.wire import (
    TaskCredentials,
    TaskFolders,
    TaskIdentity,
    TaskLease,
    TaskRanks,
    TaskResources,
    TaskSpec,
)

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEVICE_NAMES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Shoal always sets these. Other names of this kind can only narrow them."""

_NO_MPI = {
    **dict.fromkeys(("OMPI_MCA_op", "HYDRA_RMK", "HYDRA_LAUNCHER"), mpirun.ALONE),
    "PMI_PORT": "127.0.0.1:1",
}
"""Has MPI fail where it starts: in Open MPI by a component that does not exist, in MPICH by a process manager
that does not answer. A rank that starts MPI by itself would be a world of its own. So would the ranks of a
real `mpirun` that each rank started: they would be as many copies of the program, and all would end well.
"""
_NO_MPI_EITHER = {"OMPI_MCA_coll": mpirun.ALONE}
"""A second variable for the same purpose, in case a script sets the first one by itself (`OMPI_MCA_op=^avx`).
A job's own value stays.
"""


class RendezvousRound(msgspec.Struct, frozen=True, kw_only=True):
    """One rank group of an attempt: the ranks that find each other. A restart in place makes the next one."""

    number: int = 0
    master_port: int = 0
    """The port at which the group meets; 0 if it is not known."""


def first_rendezvous(replacement: int, master_port: int) -> RendezvousRound:
    """Return the round that a task starts with.

    A replacement for a lost task was in no round. It waits for the next one, whose port the control plane
    tells it.
    """
    if replacement == 0:
        return RendezvousRound(master_port=master_port)
    return RendezvousRound(number=replacement - 1)


def rank_environment(
    task_spec: TaskSpec,
    local_rank: int | None,
    rendezvous: RendezvousRound,
    *,
    work: str,
    path: str = DEFAULT_PATH,
    credentials: TaskCredentials,
    network: Mapping[str, str],
    service: Mapping[str, str],
    cache: str | None = None,
    stand_ins: str | None = None,
) -> dict[str, str]:
    """Return the whole environment of one rank.

    `local_rank` counts the ranks of this node from 0; None for a spare, which has no number so far.
    `network`: the network variables of this node, which the job may override. `service`: variables for the
    server of a replica. `cache`: the directory of the project's caches. `stand_ins`: the folder with the
    stand-ins for launchers and with the start hook, which come before everything that the job puts on these
    paths.
    """
    identity, ranks, resources = task_spec.identity, task_spec.ranks, task_spec.resources
    threads = max(1, int(resources.cpus / ranks.ranks_per_node))
    is_alone = ranks.world_size == 1
    variables = {
        **_base(identity.project, work, path),
        "OMP_NUM_THREADS": str(threads),
        **network,
        **caches.cache_variables(cache, work, {**task_spec.program.env, **credentials.secrets}),
        **(flight_recorder.recorder_variables(work) if resources.has_real_gpus else {}),
        **({} if is_alone or ranks.may_split_world else _NO_MPI_EITHER),
        **task_spec.program.env,
        **credentials.secrets,
        **({} if is_alone else _torchrun(identity, ranks, rendezvous)),
        **_slurm(task_spec, work),
        **({} if is_alone else {**_slurm_step(ranks), **_mpi(ranks)}),
        # Each of these names has Open MPI look for a step of `srun`, which does not exist here.
        **(
            {}
            if is_alone
            else {"SLURM_JOBID": str(identity.job_number), "SLURM_NODELIST": ",".join(ranks.nodes)}
        ),
        **({} if is_alone else _jax(ranks, resources, local_rank, rendezvous)),
        **(_rank_numbers(ranks, local_rank) if local_rank is not None else {}),
        **_shoal(task_spec, credentials),
        **_group(ranks, rendezvous),
        **service,
        **_devices(resources),
    }
    return variables if stand_ins is None else {**variables, **_stand_in_variables(variables, stand_ins)}


def path_without_stand_ins(environment: Mapping[str, str], path: str) -> str:
    """Return the PATH that a rank of a job with this `env` would have without Shoal's stand-ins.

    `path`: the PATH of the node.
    """
    return environment.get("PATH") or path


def _stand_in_variables(variables: Mapping[str, str], stand_ins: str) -> dict[str, str]:
    values = {
        "PATH": f"{stand_ins}/bin:{variables['PATH']}",
        "PYTHONPATH": ":".join(filter(None, (f"{stand_ins}/hook", variables.get("PYTHONPATH")))),
        "BASH_ENV": f"{stand_ins}/bash_env",
    }
    if variables.get("BASH_ENV"):
        values["SHOAL_BASH_ENV"] = variables["BASH_ENV"]
    return values


def setup_environment(
    task_spec: TaskSpec,
    *,
    work: str,
    path: str = DEFAULT_PATH,
    credentials: TaskCredentials,
    cache: str | None = None,
) -> dict[str, str]:
    """Return the environment of `setup`, which runs once on every node before its ranks and has no rank."""
    identity = task_spec.identity
    return {
        **_base(identity.project, work, path),
        **caches.cache_variables(cache, work, {**task_spec.program.env, **credentials.secrets}),
        **task_spec.program.env,
        **credentials.secrets,
        **_shoal(task_spec, credentials),
        "GROUP_RANK": str(task_spec.ranks.node_rank),
        "SHOAL_RENDEZVOUS_ROUND": str(identity.replacement),  # `setup` runs again for a replacement
        "SLURM_NODEID": str(task_spec.ranks.node_rank),
        "SLURM_JOB_ID": str(identity.job_number),
        **_devices(task_spec.resources),
    }


def _base(project: str, work: str, path: str) -> dict[str, str]:
    name = f"shoal-{project}"
    return {
        "PATH": path,
        "HOME": work,
        "PWD": work,
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "USER": name,
        "LOGNAME": name,
        "TMPDIR": "/tmp",  # noqa: S108 - private to the task inside the sandbox
        # Output goes to a pipe, where Python would hold back 8 KiB until the program ends.
        "PYTHONUNBUFFERED": "1",
    }


def _rank_numbers(ranks: TaskRanks, local_rank: int) -> dict[str, str]:
    variables = rank_variables(ranks.node_rank * ranks.ranks_per_node + local_rank, local_rank)
    return variables if ranks.world_size > 1 else {name: variables[name] for name in OWN_RANK_NAMES}


def _group(ranks: TaskRanks, rendezvous: RendezvousRound) -> dict[str, str]:
    """Return the numbers that torchrun's names hold, under names that no library looks for."""
    return {
        "SHOAL_RENDEZVOUS_ROUND": str(rendezvous.number),
        "SHOAL_WORLD_SIZE": str(ranks.world_size),
        "SHOAL_RANKS_PER_NODE": str(ranks.ranks_per_node),
        "SHOAL_NUM_NODES": str(len(ranks.nodes)),
        "SHOAL_MASTER_ADDR": ranks.master_addr,
        "SHOAL_MASTER_PORT": str(rendezvous.master_port),
    }


def _torchrun(identity: TaskIdentity, ranks: TaskRanks, rendezvous: RendezvousRound) -> dict[str, str]:
    world = str(ranks.world_size)
    return {
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(ranks.ranks_per_node),
        "GROUP_RANK": str(ranks.node_rank),
        "GROUP_WORLD_SIZE": str(len(ranks.nodes)),
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": ranks.master_addr,
        "MASTER_PORT": str(rendezvous.master_port),
        "TORCHELASTIC_RUN_ID": identity.attempt_id,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, identity.epoch - 1) + rendezvous.number),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # No agent serves a store at MASTER_PORT, so rank 0 must open it itself.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _slurm(task_spec: TaskSpec, work: str) -> dict[str, str]:
    identity, ranks, resources = task_spec.identity, task_spec.ranks, task_spec.resources
    nodes = len(ranks.nodes)
    cpus = str(max(1, int(resources.cpus)))
    values = {
        "SLURM_NODEID": str(ranks.node_rank),
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_JOB_NODELIST": ",".join(ranks.nodes),
        "SLURMD_NODENAME": identity.node,
        "SLURM_JOB_ID": str(identity.job_number),
        "SLURM_JOB_NAME": identity.job_name,
        "SLURM_JOB_ACCOUNT": identity.project,
        "SLURM_CLUSTER_NAME": "shoal",
        "SLURM_SUBMIT_DIR": work,
        "SLURM_CPUS_ON_NODE": cpus,
        "SLURM_JOB_CPUS_PER_NODE": cpus if nodes == 1 else f"{cpus}(x{nodes})",
        "SLURM_GPUS_ON_NODE": str(len(resources.gpu_ids)),
        "SLURM_RESTART_COUNT": str(max(0, identity.epoch - 1)),
    }
    if resources.memory_bytes is not None:
        values["SLURM_MEM_PER_NODE"] = str(resources.memory_bytes >> 20)
    if identity.array_index is not None:
        values["SLURM_ARRAY_TASK_ID"] = str(identity.array_index)
        values["SLURM_ARRAY_TASK_COUNT"] = str(identity.array_size or 1)
    return values


def _slurm_step(ranks: TaskRanks) -> dict[str, str]:
    """Return what `srun` sets for the tasks of a step. By these names programs notice that they are
    several.
    """
    nodes, per_node = len(ranks.nodes), str(ranks.ranks_per_node)
    return {
        "SLURM_NTASKS": str(ranks.world_size),
        "SLURM_NPROCS": str(ranks.world_size),
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node if nodes == 1 else f"{per_node}(x{nodes})",
        "SLURM_STEP_NODELIST": ",".join(ranks.nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_LAUNCH_NODE_IPADDR": ranks.master_addr,
    }


def _mpi(ranks: TaskRanks) -> dict[str, str]:
    """Return what programs read that usually run behind `mpirun` (Open MPI, then MPICH and Intel).

    An MPI world itself comes only from the real `mpirun`, which sets all of this again (`warm/mpi_rank`).
    """
    return {
        **(_NO_MPI if ranks.world_size > 1 and not ranks.may_split_world else {}),
        # Without an old version, JAX 0.11 takes these names for Open MPI 5, and would call MPI.
        "OMPI_VERSION": "4.1",
        "OMPI_COMM_WORLD_SIZE": str(ranks.world_size),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks.ranks_per_node),
        "PMI_SIZE": str(ranks.world_size),
        "MPI_LOCALNRANKS": str(ranks.ranks_per_node),
        # Names of DeepSpeed's launcher, and of Horovod before it, for the same numbers.
        "LOCAL_SIZE": str(ranks.ranks_per_node),
        "CROSS_RANK": str(ranks.node_rank),
        "CROSS_SIZE": str(len(ranks.nodes)),
    }


def _jax(
    ranks: TaskRanks, resources: TaskResources, local_rank: int | None, rendezvous: RendezvousRound
) -> dict[str, str]:
    """Return what `jax.distributed.initialize()` reads: the address. It takes the numbers from Slurm's names.

    By itself it would give each process one device, the one of its local number. Each process gets its part
    of the devices instead.
    """
    address = f"[{ranks.master_addr}]" if ":" in ranks.master_addr else ranks.master_addr
    values = {"JAX_COORDINATOR_ADDRESS": f"{address}:{rendezvous.master_port}"}
    each, rest = divmod(len(resources.gpu_ids), ranks.ranks_per_node)
    if local_rank is not None and each > 0 and rest == 0 and resources.has_real_gpus:
        mine = range(local_rank * each, (local_rank + 1) * each)
        values["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, mine))
    return values


def _shoal(task_spec: TaskSpec, credentials: TaskCredentials) -> dict[str, str]:
    identity, resources = task_spec.identity, task_spec.resources
    values = {
        "SHOAL_JOB_ID": identity.job_id,
        "SHOAL_JOB_NUMBER": str(identity.job_number),
        "SHOAL_ATTEMPT_ID": identity.attempt_id,
        "SHOAL_EPOCH": str(identity.epoch),
        "SHOAL_NODE": identity.node,
        "SHOAL_NODE_RANK": str(task_spec.ranks.node_rank),
        "SHOAL_PROJECT": identity.project,
        "SHOAL_GPUS": ",".join(map(str, resources.gpu_ids)),
    }
    if resources.gpu_milli < 1000:
        values["SHOAL_GPU_SHARE"] = f"{resources.gpu_milli / 1000:g}"
    if identity.array_index is not None:
        values["SHOAL_ARRAY_INDEX"] = str(identity.array_index)
    return {
        **values,
        **_folders(task_spec.folders),
        **_control_plane(task_spec.lease, credentials.job_token),
    }


def _folders(folders: TaskFolders) -> dict[str, str]:
    values = {}
    if folders.checkpoint_dir is not None:
        values["SHOAL_CHECKPOINT_DIR"] = folders.checkpoint_dir
    if folders.model_dir is not None:
        values["SHOAL_MODEL_DIR"] = folders.model_dir
    if folders.checkpoint_interval_s is not None:
        values["SHOAL_CHECKPOINT_INTERVAL_S"] = f"{folders.checkpoint_interval_s:g}"
    return values


def _control_plane(lease: TaskLease, job_token: str | None) -> dict[str, str]:
    values = {}
    if lease.control_url is not None:
        values["SHOAL_URL"] = ",".join(lease.control_urls) or lease.control_url
    if job_token is not None:
        values["SHOAL_TOKEN"] = job_token
    return values


def _devices(resources: TaskResources) -> dict[str, str]:
    """Return the devices. Every rank sees all GPUs of its task, as under torchrun, and uses LOCAL_RANK."""
    uuids = [gpu.uuid for gpu in resources.gpus]
    # CUDA may count in another order than the driver, so only a UUID, or PCI order, names the right device.
    names = (
        uuids if all(uuids) and len(uuids) == len(resources.gpu_ids) else [str(i) for i in resources.gpu_ids]
    )
    # A simulated GPU must never name a real one of this machine.
    visible = "" if resources.are_gpus_simulated else ",".join(names)
    return {**dict.fromkeys(DEVICE_NAMES, visible), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
