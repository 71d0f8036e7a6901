"""What every test relies on."""

from __future__ import annotations

from typing import Final

# Imported before any test runs: CPython 3.11 sometimes fails to compile a large module deep inside a running test
# ("AST constructor recursion depth mismatch").
import hypothesis.strategies  # noqa: F401
from hypothesis import HealthCheck, settings

PROFILE: Final = "any machine"

# The same examples every time, and none of them too slow, however slow or busy the machine is.
settings.register_profile(
    PROFILE, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
settings.load_profile(PROFILE)
