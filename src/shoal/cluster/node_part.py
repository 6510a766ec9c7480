"""Shoal's own part on a worker: what starts and supervises its jobs there, run by the machine's own Python.

An archive of the modules that a keeper needs and of msgspec, the one package they use, for the Python and the
processor of that machine. The rest of Shoal stays here.
"""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distribution, version
from pathlib import Path

import shoal
from shoal.cluster.facts import PYTHON, STATE_DIR
from shoal.cluster.shell import recorded
from shoal.errors import EngineRefused

NODE_DIR = "/usr/local/lib/shoal-node"
"""Nothing else is kept there."""
MODULES = ("__init__", "clock", "curve", "errors", "loopback", "porch", "proof", "socket_file", "wire")
"""All that `shoal.runtime` may import, by the rule of the house."""
PLATFORMS = {"x86_64": "manylinux2014_x86_64", "aarch64": "manylinux2014_aarch64"}


@cache
def pack(python: str, arch: str) -> bytes:
    """The archive for a machine with this Python and processor; the same bytes for the same sources.

    May take seconds where its Python is not ours: pip is asked. Raises `EngineRefused` if it cannot be had.
    """
    found = {**_own_modules(), **dict(_msgspec(python, arch))}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, content in sorted(found.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _own_modules() -> dict[str, bytes]:
    root = Path(shoal.__file__).parent
    files = [root / f"{name}.py" for name in MODULES] + sorted((root / "runtime").rglob("*.py"))
    return {f"shoal/{file.relative_to(root)}": file.read_bytes() for file in files}


def _msgspec(python: str, arch: str) -> Iterator[tuple[str, bytes]]:
    if (python, arch, "linux") == (_own_python(), _own_arch(), sys.platform):
        for file in distribution("msgspec").files or ():
            if file.parts[0] == "msgspec" and file.suffix in {".py", ".so"}:
                yield str(file), file.read_binary()
        return
    with tempfile.TemporaryDirectory() as folder:
        _download(folder, python, arch)
        for wheel in Path(folder).glob("*.whl"):
            with zipfile.ZipFile(wheel) as opened:
                for name in opened.namelist():
                    if name.startswith("msgspec/") and name.endswith((".py", ".so")):
                        yield name, opened.read(name)


def _download(folder: str, python: str, arch: str) -> None:
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += [f"--dest={folder}", f"--python-version={python}", f"--platform={PLATFORMS.get(arch, arch)}"]
    words += ["--disable-pip-version-check", f"msgspec=={version('msgspec')}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise EngineRefused(
            f"msgspec for Python {python} on {arch}, which Shoal needs on a node, cannot be had: {said}",
            hint=" ".join(words[1:]),
        )


def _own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _own_arch() -> str:
    return sysconfig.get_platform().rpartition("-")[2]


def has_part(sha256: str) -> str:
    return f'[ "$(cat {NODE_DIR}/made-from 2>/dev/null)" = {sha256} ]'


def unpack_part(sha256: str) -> str:
    """Takes the archive from standard input; this machine's Python must be able to use it."""
    place, old = f"{NODE_DIR}.new", f"{NODE_DIR}.old"
    return f"""\
set -eu
umask 022
mine=$(grep -xF 'folder {NODE_DIR}' {STATE_DIR}/made 2>/dev/null || true)
[ ! -e {NODE_DIR} ] || [ -n "$mine" ] ||
  {{ echo '{NODE_DIR} was there before Shoal; move it away' >&2; exit 1; }}
{recorded("made", f"folder {place}")}
{recorded("made", f"folder {old}")}
rm -rf {place} {old}
mkdir -p {place}
tar -xzf - --no-same-owner -C {place}
{PYTHON} -m compileall -q {place} >&2
PYTHONPATH={place} {PYTHON} -P -s -c 'import shoal.runtime.keeper' >&2
echo {sha256} >{place}/made-from
{recorded("made", f"folder {NODE_DIR}")}
[ ! -e {NODE_DIR} ] || mv {NODE_DIR} {old} # a job that starts now must not wait for long
mv {place} {NODE_DIR}
rm -rf {old}"""
