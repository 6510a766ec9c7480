"""The ways to confine a share that tests try one by one, as far as this machine offers them."""

from __future__ import annotations

import pytest

from shoal.runtime.confine.detect import detect

AVAILABLE = detect()
CGROUP = next((word for word in AVAILABLE if word.startswith("cgroup")), "cgroup1")
JOB_UID = 200_123


def mode(*mechanisms: str) -> object:
    """A parameter for `confinement`, skipped with the reason where the machine lacks it."""
    missing = [word for word in mechanisms if word not in AVAILABLE and word not in ("rlimits", "affinity")]
    reason = f"this machine does not offer {' '.join(missing)}"
    return pytest.param(
        mechanisms, id="+".join(mechanisms) or "none", marks=pytest.mark.skipif(bool(missing), reason=reason)
    )


MODES = [
    mode(CGROUP, "bubblewrap", "uid"),
    mode(CGROUP),
    mode("bubblewrap"),
    mode("rlimits", "affinity"),
    mode(),
]


def needs(*mechanisms: str) -> pytest.MarkDecorator:
    """Skip, with the reason, where the machine lacks one of them."""
    missing = [word for word in mechanisms if word not in AVAILABLE]
    return pytest.mark.skipif(bool(missing), reason=f"this machine does not offer {' '.join(missing)}")
