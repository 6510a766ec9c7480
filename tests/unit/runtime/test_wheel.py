"""The wheel for programs: its files, their dependencies, and an installation beside the whole package."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from shoal.runtime import PUBLIC
from tests.style.tree import ROOT

PACKAGE, SOURCE = ROOT / "packages" / "runtime", ROOT / "src"
CALLBACKS = ("accelerate", "lightning", "transformers")
ALLOWED = {"msgspec", "torch", "numpy", "accelerate", "lightning", "transformers", "obstore"}
"""Third-party packages: `msgspec` always, each other one only if the program uses it."""


def listed() -> set[Path]:
    """The source files in the wheel."""
    build = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    files = [(PACKAGE / path).resolve() for path in build["force-include"] if path.startswith("../")]
    return {file for path in files for file in ([path] if path.is_file() else path.rglob("*.py"))}


def file_of(module: str) -> Path | None:
    base = SOURCE / Path(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def imported(path: Path) -> set[str]:
    """Return every module that the file imports, at its top or inside of functions."""
    modules = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return modules


def needed() -> set[Path]:
    """Return the files that the public names and the callbacks import, directly or indirectly."""
    waiting = [*PUBLIC.values(), *(f"shoal.runtime.{name}" for name in CALLBACKS)]
    files = set[Path]()
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        for size in range(1, len(parts) + 1):
            path = file_of(".".join(parts[:size]))
            if path is not None and path not in files:
                files.add(path)
                waiting += [name for name in imported(path) if name.startswith("shoal")]
    return files


def test_wheel_has_every_module_that_a_program_can_reach_and_no_other() -> None:
    assert needed() == listed()


def test_wheel_needs_nothing_of_the_control_plane() -> None:
    others = {name.split(".")[0] for path in listed() for name in imported(path)} - {"shoal", "__future__"}
    assert others - set(sys.stdlib_module_names) <= ALLOWED


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = (
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        str(folder),
    )
    subprocess.run([sys.executable, "-m", *command, str(PACKAGE)], check=True, timeout=120)
    return next(folder.glob("shoal_runtime-*.whl"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """A new environment with the wheel, and the local `msgspec`."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    arguments = ("--quiet", "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *arguments], check=True, timeout=120
    )
    here = Path(sysconfig.get_path("purelib"))
    (site(folder) / "msgspec").symlink_to(here / "msgspec")
    return folder


def site(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def output_of(environment: Path, program: str) -> str:
    command = [str(environment / "bin" / "python"), "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env={}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_program_can_log_with_only_the_wheel_installed(environment: Path) -> None:
    output = output_of(
        environment, "from shoal import runtime; runtime.log(loss=1.0); print(runtime.__file__)"
    )
    assert output.startswith(str(site(environment) / "shoal_runtime" / "shoal"))


def test_missing_library_is_named(environment: Path) -> None:
    program = (
        "try:\n    import shoal.runtime.{name}\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    for name in CALLBACKS:
        assert output_of(environment, program.format(name=name)).split(".")[0] in (name, "pytorch_lightning")


def test_whole_package_comes_first_and_shares_no_file_with_the_wheel(environment: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        tops = {name.split("/")[0] for name in opened.namelist()}
    assert {entry for entry in tops if not entry.endswith(".dist-info")} == {
        "shoal_runtime",
        "shoal_runtime.pth",
    }
    whole = site(environment) / "shoal"
    whole.symlink_to(SOURCE / "shoal")
    try:
        assert output_of(environment, "import shoal; print(shoal.__file__)") == str(whole / "__init__.py")
    finally:
        whole.unlink()
