"""Where time and randomness come from. Everything else gets them as arguments."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

Clock = Callable[[], int]
Entropy = Callable[[int], bytes]


def monotonic_ns() -> int:
    """Return monotonic time in nanoseconds."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Return the time of day in nanoseconds, for the access log."""
    return time.time_ns()


def entropy(count: int) -> bytes:
    """Return `count` random bytes of the system."""
    return os.urandom(count)
