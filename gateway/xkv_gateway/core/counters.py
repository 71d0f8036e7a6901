"""What the engine counts. All start at zero and only rise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Events since the start. Objects where nothing else is said."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    load_hits: int = 0
    load_misses: int = 0
    stored: int = 0
    stored_bytes: int = 0
    exists: int = 0
    in_progress: int = 0
    no_space: int = 0
    too_large: int = 0
    cancelled: int = 0
    aborted: int = 0
    evicted_watermark: int = 0
    evicted_watermark_bytes: int = 0
    evicted_demand: int = 0
    evicted_demand_bytes: int = 0
    evicted_quota: int = 0
    evicted_quota_bytes: int = 0
    evicted_ttl: int = 0
    evicted_ttl_bytes: int = 0
    eviction_passes: int = 0
    """Background passes over the whole card that have begun."""
    eviction_cycles: int = 0
    over_quota: int = 0
    budget: int = 0
    """Refused because the budget of bytes written a day is spent."""
    deleted: int = 0
    wiped: int = 0
    erased: int = 0
    """Wiped objects whose units were erased."""
    corrupt: int = 0
    leases_granted: int = 0
    leases_renewed: int = 0
    leases_released: int = 0
    leases_expired: int = 0
    leases_refused: int = 0
    tickets_granted: int = 0
    tickets_committed: int = 0
    tickets_aborted: int = 0
    tickets_expired: int = 0
    tickets_refused: int = 0
    """Beyond the bounds of their scope."""
