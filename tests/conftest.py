"""What every test shares: one async backend, and property tests that are slow rather than flaky."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import hypothesis
import pytest
import structlog

# A shell without job control starts what it puts in the background with SIGINT ignored, and programs that
# the tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline: a shared two-core machine may take a second where it took a millisecond before.
hypothesis.settings.register_profile("shoal", deadline=None, print_blob=True)
hypothesis.settings.load_profile("shoal")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def same_log_afterwards() -> Iterator[None]:
    """Where logs go is one setting for the whole process: a test that changes it gives it back."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
