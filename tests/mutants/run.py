"""`python -m tests.mutants.run [NAME...]`: plant each bug in a copy of the tree and see who notices.

Every suite is first run on the unchanged copy: one that fails there can catch nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.mutants.planted import MUTANTS
from tests.mutants.planted.mutant import Mutant

REPO = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600.0
PYTEST = ("-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider")
SUITES: dict[str, tuple[str, ...]] = {
    "sim": ("-m", "tests.sim.run", "--seeds", "400", "--fail-fast"),
    "control": (*PYTEST, "tests/unit/control"),
    "store": (
        *PYTEST,
        "tests/unit/store/test_chain.py",
        "tests/unit/store/test_writer.py",
        "tests/unit/store/test_durability.py",
        "tests/unit/store/test_sqlite_file.py",
        "tests/contract/stores/test_memory.py",
        "tests/contract/stores/test_sqlite.py",
    ),
    "spool": (*PYTEST, "tests/unit/runtime/files/test_spool.py", "tests/unit/runtime/process/test_tree.py"),
    "reaping": (
        *PYTEST,
        "tests/unit/runtime/agent/test_reaping.py",
        "tests/unit/runtime/agent/test_spool_root.py",
    ),
    "renewal": (
        *PYTEST,
        "tests/unit/runtime/lease/test_renewal.py",
        "tests/unit/runtime/lease/test_resolver.py",
    ),
    "moves": (*PYTEST, "tests/property/test_moves.py"),
    "node agent": (
        *PYTEST,
        "tests/unit/runtime/agent/test_node_agent.py",
        "tests/unit/runtime/lease/test_agent_archive.py",
    ),
    "supervisor": (
        *PYTEST,
        "tests/e2e/supervisor/test_claims.py",
        "tests/e2e/supervisor/test_ends.py",
        "tests/e2e/supervisor/test_lease.py",
        "tests/unit/runtime/lease/test_stop_reasons.py",
        "tests/unit/runtime/process/test_cpu_limit.py",
        "tests/unit/runtime/supervisor/test_task_run.py",
    ),
    "graceful stop": (
        *PYTEST,
        "tests/unit/runtime/rank/test_graceful_stop.py",
        "tests/e2e/supervisor/test_graceful_stop.py",
    ),
    "launchers": (
        *PYTEST,
        "tests/unit/runtime/warm/test_rank_identity.py",
        "tests/unit/runtime/supervisor/test_own_launchers.py",
        "tests/unit/runtime/supervisor/test_worlds.py",
    ),
    "engine": (*PYTEST, "tests/unit/engines", "tests/contract/engines/test_local.py"),
    "serving": (
        *PYTEST,
        "tests/unit/serving",
        "tests/contract/data_plane/test_data_planes.py",
        "tests/contract/data_plane/test_balancers.py",
        "tests/property/test_rollout.py",
        "tests/property/test_serving_framing.py",
    ),
    "cluster": (*PYTEST, "tests/unit/cluster"),
    "attacks": (*PYTEST, "tests/attacks"),
}
FAILED = 1
"""What a suite that found something exits with; anything else is its own trouble."""


class MutantVerdict(NamedTuple):
    is_caught: bool
    by: str
    seconds: float


def plant(tree: Path, mutant: Mutant) -> None:
    """Change the copy. `AssertionError` when the text is not there exactly once."""
    path = tree / "src" / "shoal" / mutant.file
    text = path.read_text(encoding="utf-8")
    count = text.count(mutant.old)
    assert count == 1, f"{mutant.name}: its text occurs {count} times in {mutant.file}"
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, mutant.file, "exec")
    path.write_text(changed, encoding="utf-8")


def run_suite(tree: Path, name: str) -> int | None:
    """The suite's exit code in that tree; None when it did not end in time."""
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, *SUITES[name]],
        cwd=tree,
        env=env,
        stdout=(tree / f"{name}.out").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def copy_tree(target: Path) -> None:
    target.mkdir()
    for name in ("src", "tests", "benchmarks", "docs", "examples"):
        if (REPO / name).is_dir():
            shutil.copytree(REPO / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPO / "pyproject.toml", target)


def try_mutant(mutant: Mutant, scratch: Path) -> MutantVerdict:
    tree = scratch / mutant.name
    copy_tree(tree)
    plant(tree, mutant)
    began = time.monotonic()
    troubles = []
    try:
        for suite in mutant.suites:
            code = run_suite(tree, suite)
            if code == FAILED:
                return MutantVerdict(is_caught=True, by=suite, seconds=time.monotonic() - began)
            if code is None:
                return MutantVerdict(is_caught=True, by=f"{suite} (hangs)", seconds=time.monotonic() - began)
            if code != 0:
                troubles.append(f"{suite} exited with {code}")
        return MutantVerdict(is_caught=False, by="; ".join(troubles), seconds=time.monotonic() - began)
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def check_suites(names: list[str], scratch: Path) -> list[str]:
    """The suites that fail without any planted bug."""
    tree = scratch / "unchanged"
    copy_tree(tree)
    bad = []
    for name in names:
        code = run_suite(tree, name)
        print(f"  unchanged  {name:12}  {'passes' if code == 0 else f'exit code {code}'}", flush=True)
        if code != 0:
            bad.append(name)
            print((tree / f"{name}.out").read_text(errors="replace")[-3000:])
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these; all of them if none is named")
    options = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    unknown = set(options.names) - {mutant.name for mutant in chosen}
    if unknown:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    num_caught = 0
    with tempfile.TemporaryDirectory(prefix="shoal-mutants-") as scratch:
        suites = list(dict.fromkeys(suite for mutant in chosen for suite in mutant.suites))
        if check_suites(suites, Path(scratch)):
            print("FAILED: a suite that fails by itself catches nothing")
            return 1
        for mutant in chosen:
            verdict = try_mutant(mutant, Path(scratch))
            num_caught += verdict.is_caught
            word = "caught" if verdict.is_caught else "MISSED"
            print(f"  {word}  {mutant.name:42} {verdict.by:12} {verdict.seconds:5.0f} s", flush=True)
    print(f"{num_caught} of {len(chosen)} planted bugs caught")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
