"""What a replay counts. Pure data: the player adds, the report reads."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

PERCENTILES: Final = (50, 90, 99)
MAX_EXAMPLES: Final = 5
"""So many mismatches are described in the report; all are counted."""


class Operation(Enum):
    """The operations whose latency is measured, one sample a message."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Latencies of one operation in nanoseconds; percentiles by nearest rank, so each is a measured value."""

    count: int
    percentiles_ns: dict[int, int]
    max_ns: int


class Latencies:
    """The samples of one operation, in nanoseconds, eight bytes each."""

    def __init__(self) -> None:
        self._samples_ns = array("Q")

    def add(self, latency_ns: int) -> None:
        """Add the latency of one message."""
        self._samples_ns.append(latency_ns)

    def summary(self) -> LatencySummary | None:
        """Sum up; None when nothing was measured, which is not the same as 0."""
        if not self._samples_ns:
            return None
        ordered = sorted(self._samples_ns)
        return LatencySummary(
            count=len(ordered),
            percentiles_ns={percent: nearest_rank(ordered, percent) for percent in PERCENTILES},
            max_ns=ordered[-1],
        )


def nearest_rank(ordered: list[int], percent: int) -> int:
    """Return the smallest value that at least `percent` (1..100) of the `ordered` values do not exceed."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A block that came back with other bytes than were stored under its key."""

    request_number: int
    """1-based, in the order of the trace."""
    hash_id: int
    first_difference: int
    """Offset in the block of the first byte that differs."""


@dataclass(slots=True)
class TenantStats:
    """What one tenant's part of the trace came to."""

    requests: int = 0
    blocks_asked: int = 0
    blocks_hit: int = 0
    stores: Counter[str] = field(default_factory=Counter)
    """Blocks by the status of their store."""

    @property
    def hit_rate(self) -> float | None:
        """Hits a block asked for; None when nothing was asked."""
        return self.blocks_hit / self.blocks_asked if self.blocks_asked else None


@dataclass(slots=True)
class ReplayStats:
    """Totals of one replay."""

    requests: int = 0
    """Requests played to their end."""
    blocks_asked: int = 0
    blocks_hit: int = 0
    """Leading blocks that lookups reported as held."""
    blocks_verified: int = 0
    """Loaded blocks whose every byte was compared and equal."""
    blocks_mismatched: int = 0
    bytes_loaded: int = 0
    bytes_stored: int = 0
    leases_refused: int = 0
    """Lookups with hits that were answered without the lease they asked for."""
    leases_lost: int = 0
    """Leases that were unknown when they were given back: they had run out."""
    busy_retries: int = 0
    loads: Counter[str] = field(default_factory=Counter)
    """Blocks by the status of their load."""
    stores: Counter[str] = field(default_factory=Counter)
    """Blocks by the status of their store."""
    latencies: dict[Operation, Latencies] = field(
        default_factory=lambda: {operation: Latencies() for operation in Operation}
    )
    mismatch_examples: list[Mismatch] = field(default_factory=list)
    tenants: dict[int, TenantStats] = field(default_factory=dict)
    """By the tenant's number."""

    @property
    def hit_rate(self) -> float | None:
        """Hits a block asked for; None when nothing was asked."""
        return self.blocks_hit / self.blocks_asked if self.blocks_asked else None

    def add_mismatch(self, mismatch: Mismatch) -> None:
        """Count a mismatch and keep the first few as examples."""
        self.blocks_mismatched += 1
        if len(self.mismatch_examples) < MAX_EXAMPLES:
            self.mismatch_examples.append(mismatch)

    def of(self, tenant: int) -> TenantStats:
        """Return the part of a tenant."""
        return self.tenants.setdefault(tenant, TenantStats())

    def asked(self, tenant: int, blocks: int, hits: int) -> None:
        """Count the lookup of a prompt."""
        self.blocks_asked += blocks
        self.blocks_hit += hits
        part = self.of(tenant)
        part.requests += 1
        part.blocks_asked += blocks
        part.blocks_hit += hits
