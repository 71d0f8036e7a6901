"""What admin answers look like, as data: the schemas of the OpenAPI document and the JSON both follow from these."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from xkv_gateway.service.names import namespace_name, scope_name

if TYPE_CHECKING:
    from xkv_gateway.card.administration import WipeProgress
    from xkv_gateway.core.tenancy import NamespaceInfo, ScopeInfo, TenantInfo

NS_PER_S = 1e9


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """Why."""

    code: str
    message: str
    field: str | None = None


@dataclass(frozen=True, slots=True)
class ErrorDocument:
    """Any answer of 4xx and 5xx."""

    error: ErrorBody


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """A quota was set. `cache_salt` is `scope:HEX` or `_default`: salts are not repeated."""

    cache_salt: str
    limit_gb: float
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class QuotaDocument:
    """One quota, in units of 2^30 bytes. Without one, `exists` is false and `limit_gb` is 0."""

    cache_salt: str
    limit_gb: float
    current_usage_gb: float
    exists: bool


@dataclass(frozen=True, slots=True)
class QuotaRemoved:
    """What became of a DELETE."""

    cache_salt: str
    status: Literal["removed", "not_found"]


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """One entry of the list of quotas."""

    limit_gb: float
    current_usage_gb: float


@dataclass(frozen=True, slots=True)
class QuotaList:
    """All quotas, by the operator's name for the tenant, else `scope:HEX`."""

    users: dict[str, QuotaUsage]


@dataclass(frozen=True, slots=True)
class TenantDocument:
    """A tenant: a scope, its usage summed over namespaces."""

    name: str | None
    scope: str
    """Hexadecimal; empty: the default scope."""
    limit_bytes: int | None
    """As it was set; null: no quota of its own."""
    effective_limit_bytes: int | None
    """What holds now; null: unlimited."""
    objects: int
    charged_bytes: int
    """Whole units: live, reserved, committing and doomed."""
    leases: int
    leased_bytes: int
    counters: dict[str, int] | None
    """Events since the start, for named tenants."""

    @classmethod
    def of(cls, info: TenantInfo) -> TenantDocument:
        """Return the document of `info`."""
        return cls(
            name=info.name,
            scope=info.scope.hex(),
            limit_bytes=info.limit_bytes,
            effective_limit_bytes=info.effective_limit_bytes,
            objects=info.held.objects,
            charged_bytes=info.held.charged_bytes,
            leases=info.leases,
            leased_bytes=info.leased_bytes,
            counters=None if info.counters is None else asdict(info.counters),
        )


@dataclass(frozen=True, slots=True)
class TenantList:
    """Registered tenants, a page of them."""

    tenants: list[TenantDocument]
    total: int
    next_cursor: int | None
    """What to ask for next; null: this was the last page."""
    complete: bool
    """False: damage took quotas away, and nobody has confirmed that those that are left are all."""
    policy: str
    enforcement: str
    unnamed_objects: int
    """What scopes without a name hold together."""
    unnamed_charged_bytes: int


@dataclass(frozen=True, slots=True)
class TenantRemoved:
    """What became of a DELETE."""

    name: str
    status: Literal["removed"] = "removed"


@dataclass(frozen=True, slots=True)
class NamespaceDocument:
    """A namespace that holds something, or has a rule."""

    name: str
    """`_default`: the empty one."""
    objects: int
    charged_bytes: int
    scopes: int
    ttl_idle_s: int
    """How long its objects may live since they were last used; 0: no limit."""
    ttl_total_s: int
    """... and since they were stored."""

    @classmethod
    def of(cls, info: NamespaceInfo) -> NamespaceDocument:
        """Return the document of `info`."""
        held = info.held
        name = namespace_name(info.name)
        return cls(name, held.objects, held.charged_bytes, info.scopes, info.idle_s, info.total_s)


@dataclass(frozen=True, slots=True)
class NamespaceList:
    """Namespaces, a page of them."""

    namespaces: list[NamespaceDocument]
    total: int
    next_cursor: int | None


@dataclass(frozen=True, slots=True)
class ScopeDocument:
    """What one scope holds in one namespace."""

    scope: str
    """Hexadecimal; empty: the default scope."""
    tenant: str | None
    objects: int
    charged_bytes: int
    leases: int

    @classmethod
    def of(cls, info: ScopeInfo) -> ScopeDocument:
        """Return the document of `info`."""
        held = info.held
        return cls(info.scope.hex(), info.tenant_name, held.objects, held.charged_bytes, info.leases)


@dataclass(frozen=True, slots=True)
class NamespaceDetail:
    """One namespace, and a page of its scopes."""

    name: str
    objects: int
    charged_bytes: int
    scopes: list[ScopeDocument]
    total: int
    next_cursor: int | None
    ttl_idle_s: int
    ttl_total_s: int


@dataclass(frozen=True, slots=True)
class WipeDocument:
    """A wipe: its progress, and in the end its report."""

    id: int
    namespace: str
    scope: str | None
    """`scope:HEX` or `_default`; null: all scopes."""
    stage: str
    """`begun`: invisible; `durable`: ... and survives a crash; `done`; `failed`: the next start goes on with it."""
    objects: int
    payload_bytes: int
    erased_bytes: int
    left_bytes: int
    waiting_bytes: int
    """... of which so many wait for the end of a lease or of an I/O."""
    verification: str
    resumed: bool
    """Begun by an earlier run."""
    elapsed_s: float

    @classmethod
    def of(cls, progress: WipeProgress, now_ns: int) -> WipeDocument:
        """Return the document of `progress` at a monotonic time."""
        ended_ns = now_ns if progress.ended_ns is None else progress.ended_ns
        return cls(
            id=progress.ident,
            namespace=namespace_name(progress.namespace),
            scope=None if progress.scope is None else scope_name(progress.scope),
            stage=progress.stage.value,
            objects=progress.objects,
            payload_bytes=progress.payload_bytes,
            erased_bytes=progress.erased_bytes,
            left_bytes=progress.left_bytes,
            waiting_bytes=progress.waiting_bytes,
            verification=progress.verification.value,
            resumed=progress.resumed,
            elapsed_s=round(max(0, ended_ns - progress.began_ns) / NS_PER_S, 3),
        )


@dataclass(frozen=True, slots=True)
class WipeList:
    """Wipes that are under way, and the last few that have ended."""

    wipes: list[WipeDocument]


@dataclass(frozen=True, slots=True)
class Health:
    """The process answers."""

    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests are served from the card, and why not."""

    status: str
    card: str | None = None
    reason: str | None = None


def as_json(document: Any) -> Any:
    """Return a document as JSON types."""
    return asdict(document)
