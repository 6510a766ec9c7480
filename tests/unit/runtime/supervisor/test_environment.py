"""The environment of a rank, name by name."""

from __future__ import annotations

from shoal.runtime.supervisor.environment import RendezvousRound, rank_environment, setup_environment
from shoal.wire import GpuHandle, TaskCredentials, TaskSpec
from tests.support.runtime.task_specs import change_task_spec, task_spec_of

WORK = "/home/shoal/spool/live/att_1/node-b/work"
ORDER = task_spec_of(
    attempt_id="att_1",
    epoch=3,
    job_id="job_1",
    job_number=42,
    job_name="train-7b",
    project="vision",
    node="node-b",
    node_rank=1,
    nodes=("node-a", "node-b"),
    ranks_per_node=2,
    gpu_ids=(4, 5, 6, 7),
    run="python train.py",
    env={"LR": "0.1", "RANK": "99", "CUDA_VISIBLE_DEVICES": "0", "LD_PRELOAD": "/x.so"},
    cpus=8.0,
    memory_bytes=64 << 30,
    control_url="http://127.0.0.1:7777",
    array_index=5,
    array_size=10,
    master_addr="10.0.0.1",
    master_port=29501,
)
CREDENTIALS = TaskCredentials(proof_key="key_x", job_token="shj_y", secrets={"WANDB_API_KEY": "k"})

GOLDEN = """\
CROSS_RANK=1
CROSS_SIZE=2
CUDA_DEVICE_ORDER=PCI_BUS_ID
CUDA_VISIBLE_DEVICES=4,5,6,7
GLOO_SOCKET_IFNAME=ib0
GROUP_RANK=1
GROUP_WORLD_SIZE=2
HOME=/home/shoal/spool/live/att_1/node-b/work
HYDRA_LAUNCHER=start_it_with_mpirun
HYDRA_RMK=start_it_with_mpirun
JAX_COORDINATOR_ADDRESS=10.0.0.1:29501
JAX_LOCAL_DEVICE_IDS=2,3
LANG=C.UTF-8
LD_PRELOAD=/x.so
LOCAL_RANK=1
LOCAL_SIZE=2
LOCAL_WORLD_SIZE=2
LOGNAME=shoal-vision
LR=0.1
MASTER_ADDR=10.0.0.1
MASTER_PORT=29501
MPI_LOCALNRANKS=2
MPI_LOCALRANKID=1
NCCL_SOCKET_IFNAME==ib0
NVIDIA_VISIBLE_DEVICES=4,5,6,7
OMPI_COMM_WORLD_LOCAL_RANK=1
OMPI_COMM_WORLD_LOCAL_SIZE=2
OMPI_COMM_WORLD_NODE_RANK=1
OMPI_COMM_WORLD_RANK=3
OMPI_COMM_WORLD_SIZE=4
OMPI_MCA_coll=start_it_with_mpirun
OMPI_MCA_op=start_it_with_mpirun
OMPI_VERSION=4.1
OMP_NUM_THREADS=4
PATH=/opt/bin:/usr/bin
PMIX_RANK=3
PMI_PORT=127.0.0.1:1
PMI_RANK=3
PMI_SIZE=4
PWD=/home/shoal/spool/live/att_1/node-b/work
PYTHONUNBUFFERED=1
RANK=3
ROCR_VISIBLE_DEVICES=4,5,6,7
ROLE_NAME=default
ROLE_RANK=3
ROLE_WORLD_SIZE=4
SHELL=/bin/sh
SHOAL_ARRAY_INDEX=5
SHOAL_ATTEMPT_ID=att_1
SHOAL_EPOCH=3
SHOAL_GPUS=4,5,6,7
SHOAL_JOB_ID=job_1
SHOAL_JOB_NUMBER=42
SHOAL_LOCAL_RANK=1
SHOAL_MASTER_ADDR=10.0.0.1
SHOAL_MASTER_PORT=29501
SHOAL_NODE=node-b
SHOAL_NODE_RANK=1
SHOAL_NUM_NODES=2
SHOAL_PROJECT=vision
SHOAL_RANK=3
SHOAL_RANKS_PER_NODE=2
SHOAL_RENDEZVOUS_ROUND=0
SHOAL_TOKEN=shj_y
SHOAL_URL=http://127.0.0.1:7777
SHOAL_WORLD_SIZE=4
SLURMD_NODENAME=node-b
SLURM_ARRAY_TASK_COUNT=10
SLURM_ARRAY_TASK_ID=5
SLURM_CLUSTER_NAME=shoal
SLURM_CPUS_ON_NODE=8
SLURM_GPUS_ON_NODE=4
SLURM_JOBID=42
SLURM_JOB_ACCOUNT=vision
SLURM_JOB_CPUS_PER_NODE=8(x2)
SLURM_JOB_ID=42
SLURM_JOB_NAME=train-7b
SLURM_JOB_NODELIST=node-a,node-b
SLURM_JOB_NUM_NODES=2
SLURM_LAUNCH_NODE_IPADDR=10.0.0.1
SLURM_LOCALID=1
SLURM_MEM_PER_NODE=65536
SLURM_NNODES=2
SLURM_NODEID=1
SLURM_NODELIST=node-a,node-b
SLURM_NPROCS=4
SLURM_NTASKS=4
SLURM_NTASKS_PER_NODE=2
SLURM_PROCID=3
SLURM_RESTART_COUNT=2
SLURM_STEP_NODELIST=node-a,node-b
SLURM_STEP_NUM_NODES=2
SLURM_SUBMIT_DIR=/home/shoal/spool/live/att_1/node-b/work
SLURM_TASKS_PER_NODE=2(x2)
TMPDIR=/tmp
TORCHELASTIC_MAX_RESTARTS=0
TORCHELASTIC_RESTART_COUNT=2
TORCHELASTIC_RUN_ID=att_1
TORCHELASTIC_USE_AGENT_STORE=False
TORCH_FR_BUFFER_SIZE=2000
TORCH_NCCL_DEBUG_INFO_PIPE_FILE=/home/shoal/spool/live/att_1/node-b/work/.nccl_pipe_
TORCH_NCCL_DEBUG_INFO_TEMP_FILE=/home/shoal/spool/live/att_1/node-b/work/.nccl_record_
TORCH_NCCL_DUMP_ON_TIMEOUT=1
TZ=UTC
USER=shoal-vision
WANDB_API_KEY=k
WORLD_SIZE=4
"""


def environment(
    task_spec: TaskSpec, local_rank: int, generation: RendezvousRound | None = None
) -> dict[str, str]:
    return rank_environment(
        task_spec,
        local_rank,
        RendezvousRound(master_port=task_spec.ranks.master_port) if generation is None else generation,
        work=WORK,
        path="/opt/bin:/usr/bin",
        credentials=CREDENTIALS,
        network={"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0"},
        service={},
    )


def changed(**changes: object) -> TaskSpec:
    return change_task_spec(ORDER, **changes)


def test_only_the_rank_of_a_single_rank_job_may_start_mpi_by_itself() -> None:
    traps = {"OMPI_MCA_op", "OMPI_MCA_coll", "PMI_PORT", "HYDRA_RMK", "HYDRA_LAUNCHER"}
    assert traps <= set(environment(ORDER, 1))
    alone = changed(nodes=("node-b",), node_rank=0, ranks_per_node=1)
    # With these names Open MPI looks for a step of `srun`, and fails because there is none.
    assert (traps | {"SLURM_JOBID", "SLURM_NODELIST"}).isdisjoint(environment(alone, 0))
    chooses = changed(env={"OMPI_MCA_coll": "^hcoll"})
    assert environment(chooses, 1)["OMPI_MCA_coll"] == "^hcoll"


def test_rank_finds_the_names_of_all_launchers_in_its_environment() -> None:
    variables = environment(ORDER, 1)
    assert "".join(f"{name}={value}\n" for name, value in sorted(variables.items())) == GOLDEN


def test_restart_in_place_has_a_new_port_and_counts_as_a_restart() -> None:
    variables = environment(ORDER, 0, RendezvousRound(number=1, master_port=30007))
    assert (variables["MASTER_PORT"], variables["TORCHELASTIC_RESTART_COUNT"]) == ("30007", "3")
    assert variables["SHOAL_RENDEZVOUS_ROUND"] == "1"


def test_supervisors_key_is_not_in_a_ranks_environment() -> None:
    assert "key_x" not in " ".join(environment(ORDER, 0).values())


def test_every_rank_sees_all_gpus_of_its_task_as_under_torchrun() -> None:
    variables = [environment(ORDER, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert variables == ["4,5,6,7", "4,5,6,7"]


def test_job_without_gpus_sees_none_whatever_its_env_says() -> None:
    task_spec = changed(gpu_ids=(), env={"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "0"})
    variables = environment(task_spec, 0)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["NVIDIA_VISIBLE_DEVICES"]) == ("", "")


HANDLES = tuple(GpuHandle(index=i, minor=7 - i, uuid=f"GPU-{i:x}") for i in ORDER.resources.gpu_ids)


def test_gpus_are_named_by_uuid_because_cuda_may_count_them_in_another_order() -> None:
    variables = environment(changed(gpus=HANDLES, env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}), 0)
    assert (
        variables["CUDA_VISIBLE_DEVICES"] == variables["NVIDIA_VISIBLE_DEVICES"] == "GPU-4,GPU-5,GPU-6,GPU-7"
    )
    assert (variables["SHOAL_GPUS"], variables["CUDA_DEVICE_ORDER"]) == ("4,5,6,7", "PCI_BUS_ID")


def test_gpus_are_named_by_index_in_pci_order_if_one_has_no_uuid() -> None:
    variables = environment(changed(gpus=(*HANDLES[:3], GpuHandle(index=7))), 0)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["CUDA_DEVICE_ORDER"]) == ("4,5,6,7", "PCI_BUS_ID")


def test_simulated_gpus_never_name_a_real_one() -> None:
    variables = environment(changed(are_gpus_simulated=True, gpus=HANDLES), 0)
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["SHOAL_GPUS"]) == ("", "4,5,6,7")


def test_job_may_choose_its_threads_and_path() -> None:
    variables = environment(changed(env={"OMP_NUM_THREADS": "1", "PATH": "/mine"}), 0)
    assert (variables["OMP_NUM_THREADS"], variables["PATH"]) == ("1", "/mine")


def test_python_output_is_unbuffered_unless_the_job_overrides_it() -> None:
    assert environment(ORDER, 0)["PYTHONUNBUFFERED"] == "1"
    assert setup_environment(ORDER, work=WORK, credentials=CREDENTIALS)["PYTHONUNBUFFERED"] == "1"
    assert environment(changed(env={"PYTHONUNBUFFERED": ""}), 0)["PYTHONUNBUFFERED"] == ""


def test_job_may_choose_its_network() -> None:
    variables = environment(changed(env={"NCCL_SOCKET_IFNAME": "eth9"}), 0)
    assert (variables["NCCL_SOCKET_IFNAME"], variables["GLOO_SOCKET_IFNAME"]) == ("eth9", "ib0")


def test_jax_gets_the_groups_address_and_a_part_of_the_devices() -> None:
    variables = environment(changed(master_addr="fd00::1"), 0, RendezvousRound(number=1, master_port=30007))
    assert (variables["JAX_COORDINATOR_ADDRESS"], variables["JAX_LOCAL_DEVICE_IDS"]) == (
        "[fd00::1]:30007",
        "0,1",
    )
    assert "JAX_LOCAL_DEVICE_IDS" not in environment(changed(are_gpus_simulated=True), 0)
    assert "JAX_LOCAL_DEVICE_IDS" not in environment(changed(gpu_ids=(1, 2, 3)), 0)


def test_setup_has_no_rank_but_sees_all_devices() -> None:
    variables = setup_environment(ORDER, work=WORK, credentials=CREDENTIALS)
    assert "LOCAL_RANK" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_ranks_and_setup_get_the_projects_caches_unless_the_job_sets_its_own() -> None:
    task_spec = change_task_spec(ORDER, env={"HF_HOME": "/models"})
    setup = setup_environment(
        task_spec, work=WORK, credentials=CREDENTIALS, cache="/home/shoal/caches/vision-7"
    )
    ranks = rank_environment(
        task_spec,
        0,
        RendezvousRound(),
        work=WORK,
        credentials=CREDENTIALS,
        network={},
        service={},
        cache="/home/shoal/caches/vision-7",
    )
    for variables in (setup, ranks):
        assert variables["HF_HOME"] == "/models"
        assert variables["XDG_CACHE_HOME"] == "/home/shoal/caches/vision-7"
        assert variables["TRITON_CACHE_DIR"] == "/home/shoal/caches/vision-7/triton"


SEEMS_DISTRIBUTED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC", "ROLE_", "CROSS_", "OMPI_", "PMI_", "PMIX_", "MPI_", "JAX_"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP", "SLURM_TASKS"),
)


def test_only_rank_of_a_job_gets_no_names_of_distributed_launchers() -> None:
    variables = environment(changed(nodes=("node-b",), node_rank=0, ranks_per_node=1, env={}), 0)
    assert [name for name in variables if name.startswith(SEEMS_DISTRIBUTED)] == []
    assert (variables["SHOAL_RANK"], variables["SHOAL_WORLD_SIZE"], variables["SLURM_JOB_ID"]) == (
        "0",
        "1",
        "42",
    )


def test_stand_ins_and_start_hook_come_first_on_the_jobs_paths() -> None:
    job_variables = {"PATH": "/my/env/bin:/bin", "PYTHONPATH": "src", "BASH_ENV": "/my/rc"}
    variables = rank_environment(
        changed(env=job_variables),
        0,
        RendezvousRound(),
        work=WORK,
        credentials=CREDENTIALS,
        network={},
        service={},
        stand_ins="/w/stand-ins",
    )
    assert variables["PATH"] == "/w/stand-ins/bin:/my/env/bin:/bin"
    assert variables["PYTHONPATH"] == "/w/stand-ins/hook:src"
    assert (variables["BASH_ENV"], variables["SHOAL_BASH_ENV"]) == ("/w/stand-ins/bash_env", "/my/rc")
