"""What the options of `accelerate launch` mean to a program: variables, as Accelerate itself derives them.

It tells its processes of precision, FSDP, DeepSpeed and the rest by environment alone. Accelerate is asked
once on each node; where it is not installed there is nothing to tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys

PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")
OF_SHAPE = (
    *("--num_processes", "--num_machines", "--machine_rank", "--main_process_", "--multi_gpu"),
    *("--same_network", "--rdzv_"),
)
"""Options about which processes there are: ours to decide, and nothing else changes with them."""
DEFAULT_FILE = "huggingface/accelerate/default_config.yaml"
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
print("\\n" + json.dumps(found))
"""


def variables(python: str, folder: str, options: list[str]) -> dict[str, str]:
    """What a program behind these options finds in its environment. Takes seconds, the first time.

    Ends the process with a sentence if Accelerate refuses the options: without them it is another training.
    """
    # Its launcher says so where there is no GPU; without that word each process would train for itself.
    base = {"ACCELERATE_USE_CPU": "true"} if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else {}
    if not _has_settings(options):
        return base
    # Without the address: that of each group is another, and nothing of it is among the variables.
    digest = hashlib.sha256(repr([python, os.getcwd(), options]).encode()).hexdigest()[:16]
    known = os.path.join(folder, f"accelerate-{digest}.json")
    with contextlib.suppress(OSError, ValueError), open(known, encoding="utf-8") as file:
        return dict(json.load(file))
    found = {**_ask(python, _with_address(options)), **base}
    with open(f"{known}.{os.getpid()}", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{known}.{os.getpid()}", known)
    return found


def _with_address(words: list[str]) -> list[str]:
    """The options with an address, which Accelerate wants of several machines and the job has."""
    if any(word.startswith("--main_process_ip") for word in words):
        return words
    address = os.environ.get("SHOAL_MASTER_ADDR", "127.0.0.1")
    port = os.environ.get("SHOAL_MASTER_PORT", "29500")
    return [*words, "--main_process_ip", address, "--main_process_port", port]


def _has_settings(words: list[str]) -> bool:
    """Whether anything but the number of processes was said, here or in Accelerate's own file."""
    if any(word.startswith("-") and not word.startswith(OF_SHAPE) for word in words):
        return True
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.environ.get("HOME", ""), ".cache")
    home = os.environ.get("HF_HOME")
    places = (os.path.join(cache, DEFAULT_FILE), os.path.join(home or "", "accelerate/default_config.yaml"))
    return any(os.path.isfile(place) for place in places)


def _ask(python: str, words: list[str]) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", CODE, *words, "program.py"], capture_output=True, text=True, check=False
    )
    if "No module named 'accelerate'" in done.stderr:
        return {}
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.stderr.write(f"shoal: `accelerate launch` refuses its options: {reason}\n")
        os._exit(2)
    told = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: value for name, value in told.items() if name.startswith(PREFIXES)}
