"""The published description of the API is the one in force.

`SHOAL_GOLDEN=write pytest tests/golden/api` writes it anew; read the difference before committing it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from shoal.api.app import declared_routes, describe_api

PUBLISHED = Path(__file__).parents[3] / "docs" / "reference" / "openapi.json"


def test_the_published_description_is_the_one_in_force() -> None:
    text = json.dumps(describe_api(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PUBLISHED.write_text(text)
    assert PUBLISHED.read_text() == text


def test_every_route_is_described_with_its_permission() -> None:
    described = {
        (path, method.upper(), operation["x-shoal-permission"])
        for path, operations in describe_api()["paths"].items()
        for method, operation in operations.items()
    }
    assert described == {(row.path, row.method, row.permission or "open") for row in declared_routes()}


def test_every_reference_in_the_description_leads_somewhere() -> None:
    document = describe_api()
    references = set(re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(document["components"]["schemas"])
