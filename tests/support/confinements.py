"""The ways to confine a share that tests try one by one, as far as this machine offers them."""

from __future__ import annotations

import pytest

from shoal.runtime.confine.detect import detect

OFFERED = detect()
CGROUP = next((word for word in OFFERED if word.startswith("cgroup")), "cgroup1")
JOB_UID = 200_123


def mode(*words: str) -> object:
    """A parameter for `confinement`, skipped with the reason where the machine lacks it."""
    missing = [word for word in words if word not in OFFERED and word not in ("rlimits", "affinity")]
    reason = f"this machine does not offer {' '.join(missing)}"
    return pytest.param(
        words, id="+".join(words) or "none", marks=pytest.mark.skipif(bool(missing), reason=reason)
    )


MODES = [
    mode(CGROUP, "bubblewrap", "uid"),
    mode(CGROUP),
    mode("bubblewrap"),
    mode("rlimits", "affinity"),
    mode(),
]


def needs(*words: str) -> pytest.MarkDecorator:
    """Skip, with the reason, where the machine lacks one of them."""
    missing = [word for word in words if word not in OFFERED]
    return pytest.mark.skipif(bool(missing), reason=f"this machine does not offer {' '.join(missing)}")
