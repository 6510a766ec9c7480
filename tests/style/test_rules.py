"""Every rule is shown a planted offence: a rule that cannot fail holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.style import rules
from tests.style.tree import Module, modules

Rule = Callable[[Iterable[Module]], list[str]]

OFFENCES: list[tuple[Rule, str, str]] = [
    (rules.closed_doors, "model/job.py", "from shoal.store import tables\n"),
    (rules.closed_doors, "store/rows.py", "from shoal.engines.base import Engine\n"),
    (rules.closed_doors, "client/http.py", "import shoal.model.job\n"),
    (rules.closed_doors, "errors.py", "from shoal import clock\n"),
    (rules.closed_doors, "runtime/process/launcher.py", "from ...model import attempt\n"),
    (rules.closed_doors, "identity/roles.py", "def f() -> None:\n    from shoal.store import rows\n"),
    (rules.unknown_rooms, "attic/box.py", "x = 1\n"),
    (rules.imports_inside_functions, "control/loop.py", "async def f() -> None:\n    import json\n"),
    (rules.impurities, "scheduler/order.py", "import random\n"),
    (rules.impurities, "model/job.py", "from time import monotonic\n"),
    (rules.clock_readings, "control/loop.py", "import time\n\nnow = time.time\n"),
    (rules.clock_readings, "sim/run.py", "from datetime import datetime\n\nx = datetime.now()\n"),
    (rules.torch_imports, "sim/train.py", "from torch import distributed\n"),
    (rules.worker_weight, "runtime/order.py", "import pydantic\n"),
    (rules.takers_of_core, "control/loop.py", "def f(core: Core) -> None: ...\n"),
    (
        rules.takers_of_core,
        "api/routes/jobs.py",
        "async def f(*, core: 'core.Core | None' = None) -> None: ...\n",
    ),
    (rules.long_functions, "model/job.py", "def f() -> None:\n" + "    x = 1\n" * 70),
    (lambda found: rules.long_files(found, 600), "model/job.py", "x = 1\n" * 601),
    (rules.refused_names, "model/job_utils.py", "x = 1\n"),
    (rules.without_docstring, "model/job.py", "x = 1\n"),
]


def plant(folder: Path, files: dict[str, str]) -> list[Module]:
    base = folder / "shoal"
    for name, source in files.items():
        path = base / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return modules(base)


@pytest.mark.parametrize("rule, name, source", OFFENCES)
def test_a_planted_offence_is_found(rule: Rule, name: str, source: str, tmp_path: Path) -> None:
    found = rule(plant(tmp_path, {name: source}))
    assert len(found) == 1
    assert found[0].startswith(("src/shoal/", str(tmp_path)))


def test_an_engine_that_imports_its_sister_is_found(tmp_path: Path) -> None:
    planted = plant(
        tmp_path,
        {
            "engines/base.py": "x = 1\n",
            "engines/local/engine.py": "from shoal.engines.fake import engine\nimport shoal.engines.base\n",
            "engines/fake/engine.py": "from shoal.engines import base\n",
        },
    )
    assert len(rules.engines_that_see_each_other(planted)) == 1


def test_what_is_allowed_is_not_found(tmp_path: Path) -> None:
    """The same shapes, in rooms that may: a rule that refuses everything holds nothing either."""
    planted = plant(
        tmp_path,
        {
            "cli/jobs/run.py": '"""Run."""\n\n\ndef f() -> None:\n    from shoal.client import http\n',
            "engines/local/engine.py": "from shoal.runtime import spool\nfrom shoal.engines import base\n",
            "control/loop.py": "from shoal import store\nfrom shoal.clock import Clock\nimport asyncio\n",
            "runtime/rank.py": "import time\nimport torch\n\nnow = time.time()\n",
        },
    )
    checks: list[Rule] = [
        rules.closed_doors,
        rules.unknown_rooms,
        rules.engines_that_see_each_other,
        rules.imports_inside_functions,
        rules.impurities,
        rules.clock_readings,
        rules.torch_imports,
        rules.worker_weight,
        rules.refused_names,
    ]
    assert [finding for check in checks for finding in check(planted)] == []
