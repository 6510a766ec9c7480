"""Parse the command line of a launcher in the same way as the launcher's own `argparse`.

The program is the first argument that is neither an option nor the value of one. If no table here has an
option, only the launcher itself knows whether it takes a value, and `read` raises `UnknownOption`.
"""

from __future__ import annotations

LAUNCH = "torch.distributed.launch"
_HELP = {"h": "help"}


class OptionTable:
    """The options of a launcher, without dashes and with `-` for `_`. `letters`: options with one dash."""

    def __init__(self, flags: str, values: str, letters: dict[str, str], *, has_abbreviations: bool) -> None:
        self.flags = frozenset(flags.split())
        self.values = frozenset(values.split())
        self.letters = letters
        self.has_abbreviations = has_abbreviations

    def full(self, name: str) -> str | None:
        """Return the option for a name or an abbreviation. None: there is none, or more than one."""
        if name in self.flags or name in self.values:
            return name
        meant = [option for option in (*self.flags, *self.values) if option.startswith(name)]
        return meant[0] if self.has_abbreviations and len(meant) == 1 else None


_TORCH_FLAGS = "help standalone module no-python run-path virtual-local-rank"
_TORCH_VALUES = """
nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts monitor-interval start-method
event-log-handler role log-dir redirects tee local-ranks-filter duplicate-stdout-filters
duplicate-stderr-filters node-rank master-addr master-port local-addr logs-specs numa-binding
signals-to-handle shutdown-timeout
"""
_TORCH_LETTERS = {**_HELP, "m": "module", "r": "redirects", "t": "tee"}
_DEEPSPEED_FLAGS = """
help module no-python no-local-rank no-ssh no-ssh-check force-multi save-pid bind-cores-to-rank quiet
elastic-training
"""
_DEEPSPEED_VALUES = """
hostfile include exclude num-nodes num-gpus num-accelerators master-port master-addr node-rank launcher
launcher-args enable-each-rank-log autotuning bind-core-list ssh-port venv-script log-level min-elastic-nodes
max-elastic-nodes comment account
"""
_ACCELERATE_FLAGS = """
help quiet cpu multi-gpu tpu enable-cpu-affinity dynamo-use-fullgraph dynamo-use-dynamic
dynamo-use-regional-compilation use-deepspeed use-fsdp use-parallelism-config use-megatron-lm same-network
module no-python tpu-cluster no-tpu-cluster tpu-use-sudo downcast-bf16 fp8-use-autocast-during-eval debug
"""
_ACCELERATE_VALUES = """
config-file mixed-precision num-processes num-machines num-cpu-threads-per-process dynamo-backend dynamo-mode
gpu-ids machine-rank main-process-ip main-process-port tee log-dir role rdzv-backend rdzv-conf max-restarts
monitor-interval vm env main-training-function deepspeed-config-file zero-stage offload-optimizer-device
offload-param-device offload-optimizer-nvme-path offload-param-nvme-path gradient-accumulation-steps
gradient-clipping zero3-init-flag zero3-save-16bit-model deepspeed-hostfile deepspeed-exclusion-filter
deepspeed-inclusion-filter deepspeed-multinode-launcher deepspeed-moe-layer-cls-names fsdp-version
fsdp-offload-params fsdp-min-num-params fsdp-sharding-strategy fsdp-reshard-after-forward
fsdp-auto-wrap-policy fsdp-transformer-layer-cls-to-wrap fsdp-backward-prefetch fsdp-state-dict-type
fsdp-forward-prefetch fsdp-use-orig-params fsdp-cpu-ram-efficient-loading fsdp-sync-module-states
fsdp-activation-checkpointing fsdp-activation-checkpointing-offload megatron-lm-tp-degree
megatron-lm-use-custom-fsdp megatron-lm-no-load-optim megatron-lm-eod-mask-loss
megatron-lm-overlap-cpu-optimizer-d2h-h2d megatron-lm-no-save-optim megatron-lm-optimizer-cpu-offload
megatron-lm-use-precision-aware-optimizer megatron-lm-decoder-last-pipeline-num-layers megatron-lm-pp-degree
megatron-lm-num-micro-batches megatron-lm-sequence-parallelism megatron-lm-recompute-activations
megatron-lm-use-distributed-optimizer megatron-lm-gradient-clipping megatron-lm-recompute-granularity
megatron-lm-recompute-method megatron-lm-recompute-num-layers megatron-lm-attention-backend
megatron-lm-expert-model-parallel-size megatron-lm-context-parallel-size megatron-lm-attention-dropout
megatron-lm-hidden-dropout megatron-lm-attention-softmax-in-fp32 megatron-lm-expert-tensor-parallel-size
megatron-lm-calculate-per-token-loss megatron-lm-use-rotary-position-embeddings fp8-backend fp8-margin
fp8-interval fp8-format fp8-amax-history-len fp8-amax-compute-algo fp8-override-linear-precision fp8-opt-level
fp8-enable-fsdp-float8-all-gather fp8-pad-inner-dim aws-access-key-id aws-secret-access-key mpirun-hostfile
parallelism-config-dp-replicate-size parallelism-config-dp-shard-size parallelism-config-tp-size
parallelism-config-cp-size parallelism-config-cp-backend parallelism-config-cp-comm-strategy
parallelism-config-sp-size parallelism-config-sp-backend parallelism-config-sp-seq-length
parallelism-config-sp-seq-length-is-variable parallelism-config-sp-attn-implementation
"""
TABLES = {
    "torchrun": OptionTable(_TORCH_FLAGS, _TORCH_VALUES, _TORCH_LETTERS, has_abbreviations=True),
    LAUNCH: OptionTable(f"{_TORCH_FLAGS} use-env", _TORCH_VALUES, _TORCH_LETTERS, has_abbreviations=True),
    "deepspeed": OptionTable(
        _DEEPSPEED_FLAGS,
        _DEEPSPEED_VALUES,
        {**_HELP, "q": "quiet", "H": "hostfile", "i": "include", "e": "exclude"},
        has_abbreviations=True,
    ),
    "accelerate-launch": OptionTable(
        _ACCELERATE_FLAGS,
        _ACCELERATE_VALUES,
        {**_HELP, "q": "quiet", "m": "module", "t": "tee"},
        has_abbreviations=False,
    ),
}


class UnknownOption(Exception):
    """The launcher's table has no such option, so it is unknown whether the next argument is its value."""

    def __init__(self, option: str) -> None:
        super().__init__(option)
        self.option = option


class LauncherCommand:
    """The parsed command line of a launcher."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.options: list[tuple[str, str | None, list[str]]] = []
        """Each option in full, its value, and its arguments. The value of a flag is None, a missing value
        ""."""
        self.rest: list[str] = []
        """The program, or its module, and its arguments."""

    def has(self, flag: str) -> bool:
        return any(option == flag for option, _, _ in self.options)

    def value(self, name: str) -> str | None:
        """Return the last value of an option, or None."""
        values = [value for option, value, _ in self.options if option == name]
        return (values[-1] or None) if values else None

    def before(self, without: tuple[str, ...] = ()) -> list[str]:
        """Return the arguments before the program, except for some options and for options with a missing
        value (`--nnodes=$SLURM_NNODES` without that variable).
        """
        kept = [
            arguments for option, value, arguments in self.options if option not in without and value != ""
        ]
        return [word for arguments in kept for word in arguments]


def read(name: str, arguments: list[str], program_at: int | None = None) -> LauncherCommand:
    """Parse the arguments of a launcher. `program_at`: the position of the program according to the launcher
    itself. Without it, an option that is in no table raises `UnknownOption`.
    """
    command, at = LauncherCommand(name), 0
    end = len(arguments) if program_at is None else program_at
    while at < end and (program_at is not None or _is_option(arguments[at])):
        word, at = arguments[at], at + 1
        if word == "--" and program_at is None:
            break
        option, value = _split(word, TABLES[name])
        is_flag = option in TABLES[name].flags
        if option is None or (is_flag and value is not None):
            if program_at is None:
                raise UnknownOption(word)
            command.options.append(("", None, [word]))
        elif is_flag or value is not None:
            command.options.append((option, value, [word]))
            if option == "help":
                break
        elif at < end and not _is_option(arguments[at]):
            command.options.append((option, arguments[at], [word, arguments[at]]))
            at += 1
        else:  # `--nnodes $EMPTY`
            command.options.append((option, "", [word]))
    rest = arguments[at:] if program_at is None else arguments[end:]
    command.rest = [*rest[:1], *rest[2:]] if rest[1:2] == ["--"] else rest
    return command


def _is_option(word: str) -> bool:
    is_negative = word[1:].replace(".", "", 1).isdigit()
    return word.startswith("-") and word != "-" and not is_negative and " " not in word.partition("=")[0]


def _split(word: str, table: OptionTable) -> tuple[str | None, str | None]:
    """Return the full option of an argument, and the value inside of it. `-r3` is `--redirects=3`."""
    if not word.startswith("--"):
        return table.letters.get(word[1:2]), word[2:].lstrip("=") or None
    name, has_value, value = word.partition("=")
    return table.full(name[2:].replace("_", "-")), value if has_value else None
