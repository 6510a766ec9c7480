"""Shoal's node archive: the code that starts and supervises jobs on a worker, run by the machine's own
Python.

It has the modules that a node agent needs and the two packages they use, for the Python and the processor of
that machine. The rest of Shoal is not copied.
"""

from __future__ import annotations

import gzip
import io
import shlex
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
from shoal.cluster.shell import append_record
from shoal.errors import EngineRefused

NODE_DIR = "/usr/local/lib/shoal-node"
"""A link to the version that new jobs use. An older Shoal made a folder of it."""
VERSIONS = f"{NODE_DIR}-versions"
"""Each version is unpacked there once, under the archive's hash, and never changed: jobs run from it."""
SWEEP = """\
import pathlib, shutil, sys
versions, kept = pathlib.Path(sys.argv[1]), sys.argv[2:]
used = b""
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        used += (process / "environ").read_bytes() + (process / "maps").read_bytes()
    except PermissionError:
        if process.name != "1":  # in a container not even root may read that process, and it is not a job
            sys.exit()
    except (FileNotFoundError, ProcessLookupError):
        pass  # it has ended, or belongs to the kernel
for old in versions.iterdir():
    if str(old) not in kept and f"{versions.name}/{old.name}".encode() not in used:
        shutil.rmtree(old)
"""
"""Removes versions that no process uses; nothing at all if a process cannot be examined."""
MODULES = (
    *("__init__", "bounded_file", "clock", "connection_quota", "curve", "errors", "local_sockets", "proof"),
    *("sidecar_tls", "tar_check"),
)
FOLDERS = ("runtime", "wire")
"""`shoal.runtime` and all that it may import, by the import rules."""
PLATFORMS = {"x86_64": "manylinux2014_x86_64", "aarch64": "manylinux2014_aarch64"}


@cache
def pack(python: str, arch: str) -> bytes:
    """Return the archive for a machine with this Python and processor; the same bytes for the same sources.

    For another Python than ours, pip downloads msgspec, which may take seconds. Raise `EngineRefused` if pip
    has none.
    """
    files = {**_own_modules(), **_pynvml(), **dict(_msgspec(python, arch))}
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as tar,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            tar.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def _own_modules() -> dict[str, bytes]:
    root = Path(shoal.__file__).parent
    files = [root / f"{name}.py" for name in MODULES]
    for folder in FOLDERS:
        files += sorted((root / folder).rglob("*.py"))
    return {f"shoal/{file.relative_to(root)}": file.read_bytes() for file in files}


def _pynvml() -> dict[str, bytes]:
    """Return pynvml, which is one module, the same for every Python and processor."""
    files = distribution("nvidia-ml-py").files or ()
    return {str(file): file.read_binary() for file in files if str(file) == "pynvml.py"}


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
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--dest={folder}", f"--python-version={python}", f"--platform={PLATFORMS.get(arch, arch)}"]
    command += ["--disable-pip-version-check", f"msgspec=={version('msgspec')}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip printed nothing"])[-1]
        raise EngineRefused(
            f"pip has no msgspec, which Shoal needs on a node, for Python {python} on {arch}: {reason}",
            hint=" ".join(command[1:]),
        )


def _own_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _own_arch() -> str:
    return sysconfig.get_platform().rpartition("-")[2]


def is_archive_unpacked(sha256: str) -> str:
    place = f"{VERSIONS}/{sha256}"
    return f'[ "$(readlink {NODE_DIR})" = {place} ] && [ -d {place} ]'


def unpack_archive(sha256: str) -> str:
    """Return a script that unpacks the archive from standard input. This machine's Python must be able to use
    it.

    Running jobs keep the version they began with, and a job that starts finds a whole version at any time.
    The previous version stays, because a process that just followed the link may not have started yet. Older
    versions are removed when no process runs from them.
    """
    place = f"{VERSIONS}/{sha256}"
    return f"""\
set -eu
umask 022
for own in {NODE_DIR} {VERSIONS}; do
  [ ! -e $own ] || grep -qsxF "folder $own" {STATE_DIR}/made ||
    {{ echo "$own was there before Shoal; move it away" >&2; exit 1; }}
done
{append_record("made", f"folder {NODE_DIR}")}
{append_record("made", f"folder {VERSIONS}")}
rm -rf {place}.new
mkdir -p {place}.new
tar -xzf - --no-same-owner -C {place}.new
{PYTHON} -m compileall -q {place}.new >&2
PYTHONPATH={place}.new {PYTHON} -P -s -c 'import shoal.runtime.agent.node_agent' >&2
[ -d {place} ] || mv -T {place}.new {place}
ln -sfn {place} {VERSIONS}/now
before=$(readlink {NODE_DIR} || true)
if [ -d {NODE_DIR} ] && [ -z "$before" ]; then # as an older Shoal made it
  before={VERSIONS}/before-$(date +%s)
  mv -T {NODE_DIR} $before
fi
mv -T {VERSIONS}/now {NODE_DIR}
{PYTHON} -I -c {shlex.quote(SWEEP)} {VERSIONS} {place} $before"""
