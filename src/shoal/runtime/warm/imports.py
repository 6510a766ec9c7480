"""Find the imports with which a program begins, up to the first statement that is anything else.

These are all that a zygote may make in advance: the program has run nothing before them that could change
what they do, such as `os.environ[...] = ...` or `sys.path.insert(...)`. The program itself is not run.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sysconfig

MAX_BYTES = 1 << 20
LIBRARIES = (
    *("torch", "torchvision", "torchaudio", "torchmetrics", "triton", "numpy", "scipy", "pandas", "sklearn"),
    *("jax", "jaxlib", "flax", "optax", "chex", "transformers", "tokenizers", "datasets", "accelerate"),
    *("peft", "safetensors", "huggingface_hub", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("einops", "tqdm", "yaml", "PIL", "timm", "shoal"),
)
"""Libraries whose import only defines things. Other modules may run a program when they are imported."""
NOT_DEFINITIONS = ("antigravity", "this", "idlelib", "turtledemo", "test", "sitecustomize", "usercustomize")
"""Modules of the standard library that do something when they are imported."""


def leading_imports(sources: list[bytes]) -> list[str]:
    """Return the statements at the beginning of a program that import only known libraries.

    `sources`: the files that Python runs, in order. Text that cannot be parsed has none.
    """
    statements = []
    try:
        body = [node for source in sources for node in ast.parse(source).body]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    for node in body:
        modules = [] if _is_text(node) else _imported(node)
        if modules is None or not all(_is_known(module) for module in modules):
            break
        if modules and modules != ["__future__"]:
            statements.append(_unparse(node))
    return statements


def program_sources(arguments: list[str], cwd: str) -> list[bytes]:
    """Return what `python` with these arguments runs first. Empty: it is no source, or not in `cwd`."""
    if arguments[0] == "-c":
        return [os.fsencode(arguments[1])]
    files = _module_files(arguments[1], cwd) if arguments[0] == "-m" else [os.path.join(cwd, arguments[0])]
    sources = []
    try:
        for path in files:
            with open(path, "rb") as file:
                sources.append(file.read(MAX_BYTES + 1))
    except OSError:
        return []
    return sources if all(len(source) <= MAX_BYTES for source in sources) else []


def _module_files(module: str, cwd: str) -> list[str]:
    """Return the files that `python -m module` runs. One does not exist: it is elsewhere."""
    *packages, last = module.split(".")
    folder, files = cwd, []
    for package in packages:
        folder = os.path.join(folder, package)
        files.append(os.path.join(folder, "__init__.py"))
    below = os.path.join(folder, last)
    if os.path.isdir(below):
        return [*files, os.path.join(below, "__init__.py"), os.path.join(below, "__main__.py")]
    return [*files, f"{below}.py"]


def _unparse(node: ast.stmt) -> str:
    """Return the source of an import statement. `ast.unparse` needs Python 3.9."""
    assert isinstance(node, (ast.Import, ast.ImportFrom))
    names = ", ".join(f"{one.name} as {one.asname}" if one.asname else one.name for one in node.names)
    return f"from {node.module} import {names}" if isinstance(node, ast.ImportFrom) else f"import {names}"


def trusted_folders(sys_path: list[str]) -> list[str]:
    """Return where libraries may be loaded from: the standard library and the interpreter's site-packages."""
    return [*_standard_library(), *_site_packages(sys_path)]


def _is_text(node: ast.stmt) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _imported(node: ast.stmt) -> list[str] | None:
    """Return the modules that a statement imports. None: it does something else."""
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return [node.module] if all(one.name != "*" for one in node.names) else None
    return None


def _is_known(module: str) -> bool:
    top = module.partition(".")[0]
    if top in NOT_DEFINITIONS:
        return False
    if importlib.machinery.BuiltinImporter.find_spec(top) is not None:
        return True
    standard = importlib.machinery.PathFinder.find_spec(top, _standard_library())
    return standard is not None or top in LIBRARIES


def _standard_library() -> list[str]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"]}
    return sorted({*folders, *(os.path.join(folder, "lib-dynload") for folder in folders)})


def _site_packages(sys_path: list[str]) -> list[str]:
    """Return the folders that `site` has put on the path. One on PYTHONPATH may hold anything."""
    given = os.environ.get("PYTHONPATH", "").split(":")
    return [
        path
        for path in sys_path
        if os.path.basename(path) in ("site-packages", "dist-packages") and path not in given
    ]
