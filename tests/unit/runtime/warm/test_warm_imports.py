"""Which modules a zygote imports before any rank exists, and which commands it may run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.runtime.warm import context, imports, install, stand_in, zygote


def write(folder: Path, **files: str) -> str:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return str(folder / "train.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import json\nimport torch.nn as nn, csv\n", ["import json", "import torch.nn as nn, csv"]),
        ("'about'\nfrom __future__ import annotations\nfrom os import path\n", ["from os import path"]),
        ("import json\nfrom model import Net\nimport torch\n", ["import json"]),
        ("import os\nos.environ['A'] = '1'\nimport torch\n", ["import os"]),
        ("import os\ntry:\n    import torch\nexcept ImportError:\n    pass\n", ["import os"]),
        ("from . import torch\n", []),
        ("from torch import *\n", []),
        ("import this\n", []),
        ("import mpi4py\n", []),
        ("def broken(:\n", []),
        ("\0", []),
        ("(" * 5000, []),
    ],
)
def test_imports_count_up_to_the_first_other_statement(text: str, expected: list[str]) -> None:
    assert imports.leading_imports([text.encode()]) == expected


def test_package_begins_with_the_files_that_python_runs_first(tmp_path: Path) -> None:
    for name, text in (
        ("__init__", "import json\n"),
        ("__main__", "import csv\n"),
        ("train", "import wave\n"),
    ):
        (tmp_path / "pkg").mkdir(exist_ok=True)
        (tmp_path / "pkg" / f"{name}.py").write_text(f"{text}\n")
    sources = imports.program_sources(["-m", "pkg"], str(tmp_path))
    assert imports.leading_imports(sources) == ["import json", "import csv"]
    sources = imports.program_sources(["-m", "pkg.train"], str(tmp_path))
    assert imports.leading_imports(sources) == ["import json", "import wave"]
    (tmp_path / "pkg" / "__init__.py").unlink()
    assert imports.program_sources(["-m", "pkg.train"], str(tmp_path)) == []
    assert imports.program_sources(["missing.py"], str(tmp_path)) == []


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
    unpacked = zygote.unpack_request(stand_in.pack_request("/bin/python", 7, arguments, "/some where", odd))
    facts = {"arguments": arguments, "cwd": "/some where", "env": odd}
    assert unpacked == {"interpreter": "/bin/python", "pid": 7, **facts}


def test_every_start_waits_for_the_stand_in_so_it_loads_nothing_that_takes_time(
    tmp_path: Path,
) -> None:
    install.install(str(tmp_path), str(Path(sys.executable).parent), None)
    code = f"import sys; sys.path.append('{tmp_path}/lib'); import shoal_warm.stand_in; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-IS", "-c", code], capture_output=True, text=True, check=True)
    assert not {"enum", "re", "json", "socket", "signal", "typing", "collections"} & set(
        loaded.stdout.split()
    )


def test_everything_but_the_variables_of_a_rank_must_be_the_zygotes() -> None:
    def signature(interpreter: str = "/bin/python", cwd: str = "/", **variables: str) -> str:
        return context.signature(interpreter, "/train.py", cwd, {"LR": "3", **variables})

    same = signature()
    assert signature(RANK="1", MASTER_PORT="2", SHOAL_RENDEZVOUS_ROUND="1") == same
    for other in (
        signature(LR="4"),
        signature(HF_HOME="/x"),
        signature("/bin/python3"),
        signature(cwd="/tmp"),
    ):
        assert other != same
    os.umask(mask := os.umask(0o77))
    assert signature() == same
    os.umask(0o123)
    try:
        assert signature() != same
    finally:
        os.umask(mask)


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
def test_only_plain_commands_are_given_to_the_zygote(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], *, expected: bool
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert stand_in.is_plain(arguments) is expected


IMPORTED = """
import signal, subprocess
def save(*_): pass
signal.signal(signal.SIGTERM, save)
IGNORED = subprocess.run(["grep", "SigIgn", "/proc/self/status"], capture_output=True, text=True).stdout
"""
AS_ZYGOTE = """
import os, signal, socket, sys
from shoal.runtime.warm.image import Image
from shoal.runtime.warm.zygote import Zygote
sys.path.insert(0, sys.argv[1])
import handler_of_theirs
zygote = Zygote(socket.socket(), sys.argv[1], Image(sys.argv[1], sys.executable, "/"))
os.kill(os.getpid(), signal.SIGTERM)
ignored = int(handler_of_theirs.IGNORED.split()[1], 16)
assert not ignored & 1 << signal.SIGTERM - 1, "programs that it starts can be ended"
held = signal.getsignal(signal.SIGTERM)
assert held is not handler_of_theirs.save, "it holds out against the signal"
zygote._drop_descriptors(socket.socket())
assert signal.getsignal(signal.SIGTERM) is handler_of_theirs.save, "what was set is the rank's"
"""


def test_what_an_import_does_with_signals_is_the_ranks_and_not_the_zygotes(tmp_path: Path) -> None:
    write(tmp_path, handler_of_theirs=IMPORTED)
    command = [sys.executable, "-c", AS_ZYGOTE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
