"""Print progress on standard error, so that tables on standard output can be kept."""

from __future__ import annotations

import os
import sys
import time

BEGAN = time.monotonic()


def say(text: str) -> None:
    sys.stderr.write(f"[{time.monotonic() - BEGAN:4.0f} s, load {os.getloadavg()[0]:.1f}] {text}\n")
    sys.stderr.flush()
