"""Which faults a simulated device may have, and which it had. What they mean: `device.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Faults:
    """Probabilities are for each command; 0 everywhere is a perfect device."""

    latency_ns_max: int = 400_000
    slow_probability: float = 0.0
    """A slow command takes up to `slow_ns_max` instead."""
    slow_ns_max: int = 200_000_000
    break_probability: float = 0.0
    offline_ns_max: int = 2_000_000_000
    settle_ns: int = 5_000_000_000
    late_probability: float = 0.6
    """Share of the writes of unknown outcome that are executed later; of the rest half were executed, half never are."""
    break_on_cancel_probability: float = 0.5
    outage_probability: float = 0.0
    """For each flush: the target loses its power right before it."""
    fail_probability: float = 0.0
    transient_flip_probability: float = 0.0
    persistent_flip_probability: float = 0.0
    misdirect_probability: float = 0.0
    digest_probability: float = 0.0


@dataclass(slots=True)
class Injected:
    """Faults that happened."""

    breaks: int = 0
    outages: int = 0
    """Of the breaks: those at which the target lost its power."""
    unknown_outcomes: int = 0
    late_writes: int = 0
    landed_late: int = 0
    """Of these, so far."""
    failures: int = 0
    read_faults: int = 0
    """Transient flips, misdirected reads and failed digests."""
    persistent_flips: int = 0

    @property
    def errors(self) -> int:
        """Commands that raised something."""
        return self.breaks + self.unknown_outcomes + self.failures
