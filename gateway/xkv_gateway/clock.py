"""The one place that reads a clock or draws randomness: the composition root hands these out."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Clock = Callable[[], int]
    """Returns monotonic nanoseconds."""
    Entropy = Callable[[int], bytes]
    """Returns that many unguessable random bytes."""


def monotonic_ns() -> int:
    """Return the monotonic clock in nanoseconds. It stands still while the machine is suspended."""
    return time.monotonic_ns()


def wall_ns() -> int:
    """Return nanoseconds since 1970, to be shown to people; nothing is decided by it."""
    return time.time_ns()


def entropy(count_bytes: int) -> bytes:
    """Return `count_bytes` bytes from the kernel's random generator."""
    return os.urandom(count_bytes)
