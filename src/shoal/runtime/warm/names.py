"""Files in the zygote's folder that others than the zygote know of."""

from __future__ import annotations

IMAGE = "image"
"""Which modules the zygote has imported from where, and how much memory that took."""
EXPECTED = "expected"
"""Which it should import, and from where: those of the one before it."""
