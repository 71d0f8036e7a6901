"""The vocabulary of tenants: rules of eviction, quotas, and what an operator sees. Pure data, no behaviour.

tenant       a scope, summed over all namespaces; registered when it has a limit, a name, or both
usage        units that are charged to a scope: live, reserved, committing and doomed; not what is in quarantine
cycle        what the engine does each `interval_ns`: the place of all eviction that no store has asked for
fullness     usage divided by limit; the scope with the greatest fullness is the one most over its fair share
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .types import Lsn

LIMIT_BYTES_MAX: Final = (1 << 63) - 1
TTL_S_MAX: Final = 10 * 366 * 86_400
"""Ten years: more is no limit."""
TENANT_NAME_BYTES_MAX: Final = 64
COUNTED_TENANTS_MAX: Final = 1024
"""Named tenants with counters of their own; those named later share the counters of nobody."""


class EvictionPolicy(Enum):
    """Whose objects go when the card is full; values as in the configuration."""

    LRU = "LRU"
    """The least recently used of all."""
    ISOLATED_LRU = "IsolatedLRU"
    """The least recently used of the scope with the greatest fullness."""
    NOOP = "noop"
    """Nothing: a full card answers `no_space`. Quotas do not apply."""


class Enforcement(Enum):
    """When a quota is enforced; values as in the configuration."""

    HARD = "hard"
    """Before a store: it evicts the scope's own oldest, and what cannot fit is `over_quota`."""
    SOFT = "soft"
    """In each cycle, afterwards."""


@dataclass(frozen=True, slots=True)
class EvictionRules:
    """How room is made.

    Each cycle: when used units (doomed ones aside) reach `trigger_watermark` of the capacity, `eviction_ratio` of them
    are evicted; so are, with soft enforcement, those of a scope that reach `trigger_watermark` of its limit.
    """

    policy: EvictionPolicy = EvictionPolicy.LRU
    trigger_watermark: float = 0.8
    eviction_ratio: float = 0.2
    interval_ns: int = 1_000_000_000
    enforcement: Enforcement = Enforcement.HARD
    unregistered_limit_bytes: int = 0
    """Limit of a scope without a quota. Only for ISOLATED_LRU; with LRU such a scope has none."""


@dataclass(slots=True)
class TenantCounters:
    """Events of one tenant since the start (or since it was named). Objects where nothing else is said."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    load_hits: int = 0
    load_misses: int = 0
    stored: int = 0
    stored_bytes: int = 0
    over_quota: int = 0
    evicted_watermark: int = 0
    evicted_demand: int = 0
    evicted_quota: int = 0
    evicted_ttl: int = 0
    evicted_bytes: int = 0
    """Payload bytes, all causes."""

    def add(self, counters: TenantCounters) -> None:
        """Count what these have counted as well."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(counters, each.name))


@dataclass(frozen=True, slots=True)
class Held:
    """What a scope, a namespace, or a scope within a namespace holds."""

    objects: int = 0
    """Objects that lookups find."""
    charged_bytes: int = 0
    """Whole units: live, reserved, committing and doomed."""


@dataclass(frozen=True, slots=True)
class TenantInfo:
    """One tenant, registered or only in use."""

    scope: bytes
    name: str | None
    """The operator's name for it, unique."""
    limit_bytes: int | None
    """As it was set; None: no quota of its own (`effective_limit_bytes` tells what holds then)."""
    effective_limit_bytes: int | None
    """What holds now; None: unlimited."""
    held: Held
    leased_bytes: int
    leases: int
    counters: TenantCounters | None
    """For named tenants, up to COUNTED_TENANTS_MAX; live, the caller only reads them."""


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace that holds something, or has a rule."""

    name: str
    held: Held
    scopes: int
    idle_s: int = 0
    """How long its objects may live since they were last used; 0: no limit."""
    total_s: int = 0
    """... and since they were stored."""


@dataclass(frozen=True, slots=True)
class ScopeInfo:
    """One scope within one namespace."""

    scope: bytes
    tenant_name: str | None
    held: Held
    leases: int


_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[_Item]):
    """A part of a long list. The order is no alphabet; it is stable for what stays."""

    items: Sequence[_Item]
    total: int
    """How many there are in all."""
    next_cursor: int | None
    """What to ask for next; None: this was the last page. What comes and goes in between may be missed."""


@dataclass(slots=True)
class WipeCounts:
    """How far a wipe is, as the engine knows it. Live: the caller only reads it."""

    ident: int
    """LSN of its record; 0: what wipes of an earlier run have left."""
    namespace: str
    scope: bytes | None
    erase: bool
    """Whether units are handed out to be erased before they are free."""
    scanned: bool = False
    """All its objects are gone from the index."""
    objects: int = 0
    """Objects that became invisible."""
    payload_bytes: int = 0
    left_objects: int = 0
    """Objects whose units are not erased yet."""
    left_au: int = 0
    ready_au: int = 0
    """... of which so many wait for nothing but the eraser. The others: for a lease, an I/O or a record under way."""
    erased_au: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.scanned and not self.left_objects


@dataclass(frozen=True, slots=True)
class TtlRow:
    """How long objects of a namespace may live, as it is kept on the card. Both 0: the rule was taken away."""

    namespace: str
    idle_s: int
    """Since they were last used; 0: no limit."""
    total_s: int
    """Since they were stored; 0: no limit."""
    lsn: Lsn
    """Of the change: of two rows for one namespace the one with the greater LSN counts."""


@dataclass(frozen=True, slots=True)
class TenantRow:
    """A tenant as it is kept on the card. Neither limit nor name: it was taken out."""

    scope: bytes
    limit_bytes: int | None
    name: str | None
    lsn: Lsn
    """Of the change: of two rows for one scope the one with the greater LSN counts."""
