"""Where Shoal keeps its things on this machine: what every command needs and few need `settings` for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def home_from_env(env: Mapping[str, str] = os.environ) -> Path:
    """`SHOAL_HOME`, else `~/.shoal`."""
    given = env.get("SHOAL_HOME")
    return Path(given).absolute() if given else Path.home() / ".shoal"
