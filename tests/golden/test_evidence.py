"""The documented table of evidence is the one the code has. `SHOAL_GOLDEN=write` renews it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.model.evidence_page import render_page

PAGE = Path(__file__).parents[2] / "docs" / "inside" / "evidence.md"


def test_the_page_is_up_to_date() -> None:
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(render_page(), encoding="utf-8")
    assert render_page() == PAGE.read_text(encoding="utf-8")
