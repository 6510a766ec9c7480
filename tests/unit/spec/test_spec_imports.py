"""What `import shoal.spec` costs: the CLI and the SDK pay for it at every start."""

from __future__ import annotations

import subprocess
import sys


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
    )


def test_yaml_is_imported_only_where_files_are_loaded() -> None:
    loaded = modules_after("import shoal.spec")
    assert "pydantic" in loaded
    assert not loaded & {"yaml", "msgspec", "asyncio", "shoal.model"}
    assert "yaml" in modules_after("import shoal.spec.files")
