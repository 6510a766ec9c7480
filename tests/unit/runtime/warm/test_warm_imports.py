"""Which modules a zygote imports before any rank exists, and which commands it may run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import install, program, stand_in, zygote


def write(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return str(folder / "train.py")


def test_modules_of_others_are_found_through_the_programs_own(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="import json\nfrom data import batches\nif True:\n    import csv\n",
        data="from collections.abc import Mapping\nimport model\n",
        model="import wave\n",
    )
    modules = program.imported_by(script)
    assert {"json", "csv", "collections.abc", "wave"} <= set(modules)
    assert not {"data", "model"} & set(modules)


def test_imports_inside_functions_and_for_types_alone_are_left_to_the_program(tmp_path: Path) -> None:
    script = write(
        tmp_path,
        train="from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import heavy\n"
        "def f():\n    import late\n",
    )
    assert not {"heavy", "late"} & set(program.imported_by(script))


@pytest.mark.parametrize("text", ["def broken(:\n", "\0", "(" * 5000])
def test_source_that_cannot_be_read_names_nothing(tmp_path: Path, text: str) -> None:
    assert program.imported_by(write(tmp_path, train=text)) == []
    assert program.imported_by(str(tmp_path / "missing.py")) == []


def test_module_that_cannot_be_imported_does_not_keep_the_others_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, bad_module_here="raise RuntimeError('at import')", good_module_here="VALUE = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    program.preload(["bad_module_here", "no_such_module_here", "good_module_here"])
    assert "good_module_here" in sys.modules
    del sys.modules["good_module_here"]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("python train.py", True),
        ("cd src && python3 -m pkg.train --lr $LR", True),
        ("torchrun --nproc-per-node 4 train.py", True),
        ("mpirun -np 4 ./solver", True),
        ("/opt/env/bin/python train.py", True),
        ("bash train.sh", False),
        ("./pythonic --x", False),
    ],
)
def test_scripts_that_start_python_are_recognised(run: str, *, expected: bool) -> None:
    assert install.is_python(run) is expected


def test_a_request_is_read_as_it_was_written() -> None:
    odd = {"PLAIN": "1", "EMPTY": "", "LINES": "a\nb=c", "BYTES": "\udcff"}
    arguments = ["-c", "print('=')\n", "", "grün"]
    unpacked = zygote.unpack_request(stand_in.pack_request(arguments, "/some where", odd))
    assert unpacked == {"arguments": arguments, "cwd": "/some where", "env": odd}


def test_every_start_waits_for_the_stand_in_so_it_loads_nothing_that_takes_time(
    tmp_path: Path,
) -> None:
    install.install(str(tmp_path), str(Path(sys.executable).parent), None)
    code = f"import sys; sys.path.append('{tmp_path}/lib'); import shoal_warm.stand_in; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert not {"enum", "re", "json", "socket", "signal", "typing", "collections"} & set(
        loaded.stdout.split()
    )


def test_interpreter_and_early_variables_must_be_the_zygotes() -> None:
    here = {"PYTHONPATH": "/a", "OMP_NUM_THREADS": "1", "LR": "3"}
    signature = stand_in.fork_signature(sys.executable, here)
    assert stand_in.fork_signature(sys.executable, {**here, "LR": "4", "RANK": "1"}) == signature
    assert stand_in.fork_signature(sys.executable, {**here, "OMP_NUM_THREADS": "2"}) != signature
    assert stand_in.fork_signature("/bin/sh", here) != signature


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-u", "-m", "x"], True),
        (["-c", "1"], True),
        (["-O", "x.py"], False),
        ([], False),
        (["no.py"], False),
    ],
)
def test_only_plain_commands_are_given_to_the_zygote(arguments: list[str], *, expected: bool) -> None:
    assert stand_in.is_plain(arguments) is expected


IMPORTED = """
import signal, subprocess
def save(*_): pass
signal.signal(signal.SIGTERM, save)
IGNORED = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True).stdout
"""
AS_ZYGOTE = """
import os, signal, socket, sys
from shoal.runtime.warm.zygote import Zygote
folder, sets_before = sys.argv[1], sys.argv[2] == "before"
sys.path.insert(0, folder)
if sets_before:
    import handler_of_theirs
zygote = Zygote(socket.socket(), folder)
with open(f"{folder}/learned", "w") as file:
    file.write("handler_of_theirs")
zygote._learn()
os.kill(os.getpid(), signal.SIGTERM)
import handler_of_theirs
ignored = int(handler_of_theirs.IGNORED.split()[1], 16)
assert not ignored & 1 << signal.SIGTERM - 1, "programs that it starts can be ended"
held = signal.getsignal(signal.SIGTERM)
assert held is not handler_of_theirs.save, "it holds out against the signal"
zygote._drop_descriptors(socket.socket())
assert signal.getsignal(signal.SIGTERM) is handler_of_theirs.save, "what was set is the rank's"
"""


@pytest.mark.parametrize("when", ["before", "later"])
def test_what_an_import_does_with_signals_is_the_ranks_and_not_the_zygotes(tmp_path: Path, when: str) -> None:
    write(tmp_path, handler_of_theirs=IMPORTED)
    command = [sys.executable, "-c", AS_ZYGOTE, str(tmp_path), when]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
