"""What every test shares: one async backend, and property tests that are slow rather than flaky."""

from __future__ import annotations

import hypothesis
import pytest

# No deadline: a shared two-core machine may take a second where it took a millisecond before.
hypothesis.settings.register_profile("shoal", deadline=None, print_blob=True)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
