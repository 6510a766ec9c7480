"""Settings of launchers that need more than their command line.

`accelerate_settings`: `accelerate launch` passes precision, FSDP, DeepSpeed and the rest to its processes
only as environment variables. Accelerate itself derives them from its options and its configuration file.
Shoal asks it once on each node. If Accelerate is not installed, there are none.

`deepspeed_counts`: how many nodes and processes `deepspeed` takes from its host file, `--include` and
`--exclude`. Shoal has chosen the nodes and their GPUs, so the names there are ignored, but the numbers must
match.

`program_at`: where the launcher's own parser finds the program, if the command line has options that no table
here knows. Another version may have them, or they are misspelt. This imports the launcher, which takes
seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess

from . import launchers, options
from .options import LAUNCH

PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
OF_SHAPE = (
    *("num-processes", "num-machines", "machine-rank", "main-process-ip", "main-process-port", "multi-gpu"),
    *("same-network", "rdzv-backend", "rdzv-conf", "module", "quiet"),
)
"""Options that only choose the number and address of processes, which Shoal decides."""
MAX_BYTES = 1 << 20
DEFAULT_FILES = ("accelerate/default_config.yaml", "accelerate/default_config.json")
ACCELERATE_CODE = """
import json, os, sys
from accelerate.commands import launch
from accelerate.utils import launch as prepare
args = launch.launch_command_parser().parse_args(sys.argv[1:])
args, defaults, from_file = launch._validate_launch_command(args)
if args.use_deepspeed and not args.cpu:
    fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if from_file else ())]
    args.deepspeed_fields_from_accelerate_config = ",".join(fields)
    found = prepare.prepare_deepspeed_cmd_env(args)[1]
elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
    found = prepare.prepare_multi_gpu_env(args)
else:
    found = prepare.prepare_simple_launcher_cmd_env(args)[1]
said = [None, None, ""]
if defaults:
    said = [args.num_processes, args.num_machines, args.config_file or launch.default_config_file]
print("\\n" + json.dumps([found, *said]))
"""


def accelerate_settings(
    python: str, folder: str, command: options.LauncherCommand
) -> tuple[dict[str, str], dict[str, launchers.LauncherNumber]]:
    """Return the program's variables, and the numbers that Accelerate reads from a file, by option.

    `LauncherRefused`: Accelerate refuses its options, and training without them would differ. The first call
    on a node takes seconds.
    """
    # Without a GPU the real launcher sets this. Without it, each process would train by itself.
    base = {"ACCELERATE_USE_CPU": "true"} if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else {}
    files = _config_files(command)
    if not files and all(option in OF_SHAPE for option, _, _ in command.options):
        return base, {}
    # The address is left out: it differs in each round, and no variable depends on it.
    state = repr([python, os.getcwd(), command.before(), files])
    cache_file = os.path.join(folder, f"accelerate-{hashlib.sha256(state.encode()).hexdigest()[:16]}.json")
    try:
        with open(cache_file, encoding="utf-8") as file:
            settings = json.load(file)
    except (OSError, ValueError):
        settings = _ask_accelerate(python, _with_address(command))
        with open(f"{cache_file}.{os.getpid()}", "w", encoding="utf-8") as file:
            json.dump(settings, file)
        os.replace(f"{cache_file}.{os.getpid()}", cache_file)
    variables, in_all, nodes, place = settings
    return {**variables, **base}, _accelerate_numbers(in_all, nodes, place)


def _accelerate_numbers(
    in_all: int | None, nodes: int | None, place: str
) -> dict[str, launchers.LauncherNumber]:
    numbers = {}
    for option, number, variable in (
        ("num_processes", in_all, "SHOAL_WORLD_SIZE"),
        ("num_machines", nodes, "SHOAL_NUM_NODES"),
    ):
        if number is not None:
            remedy = f"write `--{option} {os.environ.get(variable, '1')}` behind `accelerate launch`"
            numbers[option.replace("_", "-")] = launchers.LauncherNumber(str(number), f"`{place}`", remedy)
    return numbers


def _with_address(command: options.LauncherCommand) -> list[str]:
    """Return the options with the job's address, which Accelerate requires for several machines."""
    options_before = command.before()
    if command.value("main-process-ip"):
        return options_before
    address = os.environ.get("SHOAL_MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("SHOAL_MASTER_PORT", "29500")
    return [*options_before, "--main_process_ip", address, "--main_process_port", port]


def _config_files(command: options.LauncherCommand) -> list[bytes]:
    """Return the text of each configuration file that Accelerate may read. A script may rewrite them."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    homes = (os.environ.get("HF_HOME", ""), os.path.join(cache, "huggingface"))
    places = [os.path.join(home, name) for home in homes if home for name in DEFAULT_FILES]
    texts = []
    for place in (command.value("config-file"), *places):
        with contextlib.suppress(OSError), open(place or "", "rb") as file:
            texts.append(file.read(MAX_BYTES))
    return texts


def _ask_accelerate(python: str, arguments: list[str]) -> list[object]:
    """Return the variables, the numbers of processes and machines, and the file with these numbers."""
    done = subprocess.run(
        [python, "-c", ACCELERATE_CODE, *arguments, "program.py"], capture_output=True, text=True, check=False
    )
    if "No module named 'accelerate'" in done.stderr:
        return [{}, None, None, ""]
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise launchers.LauncherRefused(
            f"`accelerate launch` refuses its options: {reason}",
            "mend the options, or its configuration file",
        )
    variables, *others = json.loads(done.stdout.strip().splitlines()[-1])
    return [{name: value for name, value in variables.items() if name.startswith(PREFIXES)}, *others]


DEFAULT_HOSTFILE = "/job/hostfile"
LOCALHOST = "localhost"
"""The only host if there is no file."""


def deepspeed_counts(command: options.LauncherCommand) -> dict[str, launchers.LauncherNumber]:
    """Return the numbers by the equivalent option. `LauncherRefused`: DeepSpeed would refuse them, too."""
    hostfile = command.value("hostfile")
    path = hostfile or DEFAULT_HOSTFILE
    place, remedy = f"`{path}`", "leave `--hostfile` out" if hostfile else f"remove `{path}`"
    slots, has_file = {LOCALHOST: _visible_gpus()}, os.path.isfile(path)
    if has_file:
        with open(path, encoding="utf-8") as file:
            slots = _hosts(file.readlines(), path)
    for option in ("include", "exclude"):
        text = command.value(option)
        if text:
            place, remedy = f"`--{option}`", f"leave `--{option}` out"
            chosen = _chosen(option, text, slots)
            if option == "exclude":
                chosen = {name: slots[name] - chosen.get(name, set()) for name in slots}
            slots = chosen
    names = [name for name in slots if slots[name]]
    nodes = command.value("num-nodes")
    names = names[: int(nodes or 0)] if launchers.is_number(nodes) else names
    counts = sorted({len(slots[name]) for name in names})
    if len(counts) > 1 and not command.value("num-gpus"):
        raise launchers.LauncherRefused(
            f"the launcher asks for {' and '.join(map(str, counts))} processes on different nodes ({place})",
            f"each node of a job has as many: set `ranks_per_node` in the job, and {remedy}",
        )
    counts_by_option = {"num-nodes": str(len(names))} if has_file else {}
    if counts and (has_file or command.value("include") or command.value("exclude")):
        counts_by_option["num-gpus"] = str(counts[0])
    return {
        option: launchers.LauncherNumber(number, place, remedy) for option, number in counts_by_option.items()
    }


def _visible_gpus() -> set[int]:
    return set(range(len([gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu])))


def _hosts(lines: list[str], path: str) -> dict[str, set[int]]:
    """Parse the slots of each host from lines like `node-1 slots=8`."""
    slots_by_host = {}
    for line in lines:
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        count = fields[1][len("slots=") :] if len(fields) > 1 and fields[1].startswith("slots=") else ""
        if not launchers.is_number(count) or fields[0] in slots_by_host:
            raise launchers.LauncherRefused(
                f"`deepspeed` cannot read the line `{line.strip()}` of `{path}`",
                "write a line `NAME slots=NUMBER` for each host, or no file: Shoal has chosen the nodes",
            )
        slots_by_host[fields[0]] = set(range(int(count)))
    return slots_by_host


def _chosen(option: str, text: str, slots: dict[str, set[int]]) -> dict[str, set[int]]:
    """Parse the hosts and slots of `node-1@node-2:0,2`. A host without numbers means all its slots."""
    chosen: dict[str, set[int]] = {}
    for spec in text.split("@"):
        name, _, listed = spec.partition(":")
        numbers = listed.split(",") if listed else []
        if name not in slots or not all(launchers.is_number(word) for word in numbers):
            raise launchers.LauncherRefused(
                f"`deepspeed --{option} {text}` names `{spec}`, and there is only {', '.join(slots)}",
                f"leave `--{option}` out: Shoal has chosen the nodes and their GPUs",
            )
        chosen[name] = chosen.get(name, set()) | ({int(word) for word in numbers} or slots[name])
    return chosen


IMPORTS = {
    "torchrun": "from torch.distributed.run import parse_args",
    LAUNCH: "from torch.distributed.launch import parse_args",
    "deepspeed": "from deepspeed.launcher.runner import parse_args",
    "accelerate-launch": "from accelerate.commands.launch import launch_command_parser as parser; "
    "parse_args = parser().parse_args",
}
_PARSER_CODE = """
import sys
words = sys.argv[1:]
found = vars(parse_args(words))
rest = found["user_args" if "user_args" in found else "training_script_args"]
print(f"\\n{len(words) - len(rest) - 1}")
"""


def program_at(python: str, name: str, arguments: list[str], option: str) -> int:
    """Return the position of the program in the launcher's arguments. `LauncherRefused`: its parser fails.

    `option`: the unknown option, for the message.
    """
    done = subprocess.run(
        [python, "-c", f"{IMPORTS[name]}{_PARSER_CODE}", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    position = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode == 0 and launchers.is_number(position):
        return int(position)
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise launchers.LauncherRefused(
        f"`{name}` does not take the option `{option}`: {reason}",
        f"leave `{option}` out, or write it as `{name} --help` does",
    )
