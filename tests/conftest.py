"""What every test relies on."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING, Final

# Imported before any test runs: CPython 3.11 sometimes fails to compile a large module deep inside a running test
# ("AST constructor recursion depth mismatch").
import hypothesis.strategies  # noqa: F401
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

PROFILE: Final = "any machine"

# The same examples every time, and none of them too slow, however slow or busy the machine is.
settings.register_profile(
    PROFILE, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(PROFILE)

# A shell starts what goes to its background with SIGINT ignored, which children keep: none of those here would hear of Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that sets up logging in this process does so for its own test only."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
