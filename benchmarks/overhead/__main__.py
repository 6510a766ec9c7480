"""Steps of one training program bare, under torchrun, and under Shoal with `shoal.runtime`, in one run.

    python -m benchmarks.overhead [--size small|350m] [--steps 120] [--rounds 3]

Rounds alternate, so other load of the machine affects all variants alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import table, times

PROGRAM = Path(__file__).with_name("program.py")
SOURCE = str(Path(__file__).parents[2] / "src")
BIN = Path(sys.executable).parent


def rate_in(text: str) -> dict[str, float]:
    line = next(line for line in text.splitlines() if "RATE " in line)
    rate: dict[str, float] = json.loads(line.partition("RATE ")[2])
    return rate


def ran(command: list[str], env: dict[str, str]) -> str:
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def plain(command: list[str], options: argparse.Namespace) -> dict[str, float]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    return rate_in(ran([*command, str(PROGRAM), "bare", options.size, str(options.steps)], env))


def under_shoal(options: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="overhead-", dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        env = {**os.environ, "SHOAL_HOME": f"{folder}/home", "PATH": f"{BIN}:/usr/bin:/bin"}
        spec = {
            "name": "overhead",
            "workdir": str(PROGRAM.parent),
            "run": f"python {PROGRAM.name} runtime {options.size} {options.steps}",
            "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE},
            # Bare, its threads have the whole machine: fewer CPUs would measure the limit, not Shoal.
            "resources": {
                "cpus": min(4, os.cpu_count() or 1),
                "memory": "16GB",
                **({"gpus": 1} if options.size == "350m" else {}),
            },
            "retry": 3,
        }
        path = Path(folder, "job.yaml")
        path.write_text(json.dumps(spec))
        shoal = [sys.executable, "-c", "from shoal.cli.main import main; main()"]
        ran([*shoal, "up"], env)
        try:
            return rate_in(ran([*shoal, "run", str(path)], env))
        finally:
            ran([*shoal, "down", "--jobs"], env)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", default="small", choices=["small", "350m"])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    rates_by_variant: dict[str, list[dict[str, float]]] = {"bare": [], "torchrun": [], "Shoal": []}
    for number in range(options.rounds):
        rates_by_variant["bare"].append(plain([sys.executable], options))
        rates_by_variant["torchrun"].append(plain(torchrun, options))
        rates_by_variant["Shoal"].append(under_shoal(options))
        step_texts = {
            name: f"{rates[-1]['step_s'] * 1000:.2f} ms" for name, rates in rates_by_variant.items()
        }
        sys.stderr.write(f"round {number + 1}: {step_texts}\n")
    rows = [_row(name, rates, rates_by_variant["bare"]) for name, rates in rates_by_variant.items()]
    title = f"{options.size}: one rank, median of {options.rounds} rounds of {options.steps} steps, measured"
    head = ["", "ms a step", "of bare", "tokens/s", "MFU (H200)"]
    sys.stdout.write(table(title, head, rows))


def _row(name: str, rates: list[dict[str, float]], bare: list[dict[str, float]]) -> list[str]:
    def middle(of: list[dict[str, float]], key: str) -> float:
        return statistics.median(rate[key] for rate in of)

    step_s = middle(rates, "step_s")
    mfu = f"{middle(rates, 'mfu'):.1%}"
    return [
        name,
        f"{step_s * 1000:.2f}",
        times(step_s, middle(bare, "step_s")),
        f"{middle(rates, 'tokens_per_s'):,.0f}",
        mfu,
    ]


if __name__ == "__main__":
    main()
