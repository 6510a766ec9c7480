"""The wheel for programs: what is in it, what that needs, and that it lives beside the whole package."""

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
"""Of others than Python itself: `msgspec` always, each other one where a program asks for it."""


def listed() -> set[Path]:
    """The source files in the wheel."""
    told = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    found = [(PACKAGE / path).resolve() for path in told["force-include"] if path.startswith("../")]
    return {file for path in found for file in ([path] if path.is_file() else path.rglob("*.py"))}


def file_of(module: str) -> Path | None:
    base = SOURCE / Path(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.exists()), None)


def imported(path: Path) -> set[str]:
    """Every module that the file names in an import, at its top or inside of functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def needed() -> set[Path]:
    """The files that the public names and the callbacks import, one from the other."""
    waiting = [*PUBLIC.values(), *(f"shoal.runtime.{name}" for name in CALLBACKS)]
    found = set[Path]()
    while waiting:
        module = waiting.pop()
        parts = module.split(".")
        for size in range(1, len(parts) + 1):
            path = file_of(".".join(parts[:size]))
            if path is not None and path not in found:
                found.add(path)
                waiting += [name for name in imported(path) if name.startswith("shoal")]
    return found


def test_wheel_has_every_module_that_a_program_can_reach_and_no_other() -> None:
    assert needed() == listed()


def test_wheel_needs_nothing_of_the_control_plane() -> None:
    others = {name.split(".")[0] for path in listed() for name in imported(path)} - {"shoal", "__future__"}
    assert others - set(sys.stdlib_module_names) <= ALLOWED


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    words = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder))
    subprocess.run([sys.executable, "-m", *words, str(PACKAGE)], check=True, timeout=120)
    return next(folder.glob("shoal_runtime-*.whl"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An empty one with the wheel, and `msgspec` as it is here."""
    folder = tmp_path_factory.mktemp("environment") / "env"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    words = ("--quiet", "install", "--no-deps", "--no-index", str(wheel))
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *words], check=True, timeout=120)
    here = Path(sysconfig.get_path("purelib"))
    (site(folder) / "msgspec").symlink_to(here / "msgspec")
    return folder


def site(environment: Path) -> Path:
    return next((environment / "lib").glob("python*/site-packages"))


def said_by(environment: Path, program: str) -> str:
    words = [str(environment / "bin" / "python"), "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", env={}, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_program_logs_in_an_environment_that_has_the_wheel_alone(environment: Path) -> None:
    said = said_by(environment, "from shoal import runtime; runtime.log(loss=1.0); print(runtime.__file__)")
    assert said.startswith(str(site(environment) / "shoal_runtime" / "shoal"))


def test_what_needs_another_library_says_which(environment: Path) -> None:
    program = (
        "try:\n    import shoal.runtime.{name}\nexcept ModuleNotFoundError as error:\n    print(error.name)"
    )
    for name in CALLBACKS:
        assert said_by(environment, program.format(name=name)).split(".")[0] in (name, "pytorch_lightning")


def test_whole_package_comes_first_and_neither_has_a_file_of_the_other(
    environment: Path, wheel: Path
) -> None:
    with zipfile.ZipFile(wheel) as opened:
        tops = {name.split("/")[0] for name in opened.namelist()}
    assert {one for one in tops if not one.endswith(".dist-info")} == {"shoal_runtime", "shoal_runtime.pth"}
    whole = site(environment) / "shoal"
    whole.symlink_to(SOURCE / "shoal")
    try:
        assert said_by(environment, "import shoal; print(shoal.__file__)") == str(whole / "__init__.py")
    finally:
        whole.unlink()
