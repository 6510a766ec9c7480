"""What `accelerate launch` makes of its options and of its configuration file.

It tells its processes of precision, FSDP, DeepSpeed and the rest by environment alone, as Accelerate itself
derives them. It is asked once on each node; where it is not installed there is nothing to tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess

from . import launchers, options

PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
OF_SHAPE = (
    *("num-processes", "num-machines", "machine-rank", "main-process-ip", "main-process-port", "multi-gpu"),
    *("same-network", "rdzv-backend", "rdzv-conf", "module", "quiet"),
)
"""Options about which processes there are: ours to decide, and nothing else changes with them."""
MAX_BYTES = 1 << 20
DEFAULT_FILES = ("accelerate/default_config.yaml", "accelerate/default_config.json")
CODE = """
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


def settings(
    python: str, folder: str, command: options.Command
) -> tuple[dict[str, str], dict[str, launchers.Said]]:
    """What the program finds in its environment, and the numbers that Accelerate has from a file, by option.

    `Refused`: Accelerate refuses its options, and without them it is another training. Takes seconds, the
    first time.
    """
    # Its launcher says so where there is no GPU; without that word each process would train for itself.
    base = {"ACCELERATE_USE_CPU": "true"} if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else {}
    files = _files(command)
    if not files and all(option in OF_SHAPE for option, _, _ in command.options):
        return base, {}
    # Without the address: that of each group is another, and nothing of it is among the variables.
    state = repr([python, os.getcwd(), command.before(), files])
    known = os.path.join(folder, f"accelerate-{hashlib.sha256(state.encode()).hexdigest()[:16]}.json")
    try:
        with open(known, encoding="utf-8") as file:
            told = json.load(file)
    except (OSError, ValueError):
        told = _ask(python, _with_address(command))
        with open(f"{known}.{os.getpid()}", "w", encoding="utf-8") as file:
            json.dump(told, file)
        os.replace(f"{known}.{os.getpid()}", known)
    found, in_all, nodes, place = told
    return {**found, **base}, _numbers(in_all, nodes, place)


def _numbers(in_all: int | None, nodes: int | None, place: str) -> dict[str, launchers.Said]:
    said = {}
    for option, number, variable in (
        ("num_processes", in_all, "SHOAL_WORLD_SIZE"),
        ("num_machines", nodes, "SHOAL_NUM_NODES"),
    ):
        if number is not None:
            remedy = f"write `--{option} {os.environ.get(variable, '1')}` behind `accelerate launch`"
            said[option.replace("_", "-")] = launchers.Said(str(number), f"`{place}`", remedy)
    return said


def _with_address(command: options.Command) -> list[str]:
    """The options with an address, which Accelerate wants of several machines and the job has."""
    words = command.before()
    if command.value("main-process-ip"):
        return words
    address = os.environ.get("SHOAL_MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("SHOAL_MASTER_PORT", "29500")
    return [*words, "--main_process_ip", address, "--main_process_port", port]


def _files(command: options.Command) -> list[bytes]:
    """The text of each configuration file that Accelerate may read: a script may write another one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    homes = (os.environ.get("HF_HOME", ""), os.path.join(cache, "huggingface"))
    places = [os.path.join(home, name) for home in homes if home for name in DEFAULT_FILES]
    texts = []
    for place in (command.value("config-file"), *places):
        with contextlib.suppress(OSError), open(place or "", "rb") as file:
            texts.append(file.read(MAX_BYTES))
    return texts


def _ask(python: str, words: list[str]) -> list[object]:
    """The variables, the numbers of processes and machines, and the file that they are from."""
    done = subprocess.run(
        [python, "-c", CODE, *words, "program.py"], capture_output=True, text=True, check=False
    )
    if "No module named 'accelerate'" in done.stderr:
        return [{}, None, None, ""]
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise launchers.Refused(
            f"`accelerate launch` refuses its options: {reason}",
            "mend the options, or its configuration file",
        )
    variables, *others = json.loads(done.stdout.strip().splitlines()[-1])
    return [{name: value for name, value in variables.items() if name.startswith(PREFIXES)}, *others]
