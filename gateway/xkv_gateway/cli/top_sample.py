"""What `top` knows: two looks at a gateway, and what happened between them. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from xkv_gateway.cli.tables import scope_text

EVICTIONS: Final = ("evicted_watermark", "evicted_demand", "evicted_quota", "evicted_ttl")


@dataclass(frozen=True, slots=True)
class Look:
    """A gateway at one moment."""

    at_ns: int
    status: dict[str, Any]
    """`GET /v1/status`."""
    tenants: list[dict[str, Any]]
    """Entries of `GET /v1/tenants`."""
    unnamed_objects: int
    unnamed_charged_bytes: int


@dataclass(frozen=True, slots=True)
class TenantLine:
    """One tenant between two looks. Rates are a second; None: not counted for this tenant."""

    name: str
    charged_bytes: int
    limit_bytes: int | None
    objects: int
    lookup_keys: float | None
    hit_rate: float | None
    """None: nothing was asked."""
    stored_bytes: float | None
    evicted: float | None
    over_quota: float | None


@dataclass(frozen=True, slots=True)
class View:
    """Everything that the screen shows."""

    elapsed_s: float
    state: str
    card: str
    reason: str
    used_share: float
    requests: dict[str, float]
    hit_rate: float | None
    read_bytes: float
    write_bytes: float
    evicted: float
    errors: float
    queues: dict[str, int]
    journal_share: float
    leases: int
    tenants: list[TenantLine]

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON types."""
        return asdict(self)


def view(before: Look, now: Look) -> View:
    """Return what happened between two looks. Where the gateway was started anew in between, since its start."""
    elapsed_s = max(1e-3, (now.at_ns - before.at_ns) / 1e9)
    old = before.status if before.status["pid"] == now.status["pid"] else None
    status = now.status

    def rate(group: str, name: str) -> float:
        was = old[group].get(name, 0) if old else 0
        return float(status[group].get(name, 0) - was) / elapsed_s

    usage, journal = status["usage"], status["card"]["journal"]
    known = {tenant["scope"]: tenant for tenant in before.tenants} if old else {}
    lines = [_line(tenant, known.get(tenant["scope"]), elapsed_s) for tenant in now.tenants]
    rest = TenantLine(
        "(all without a name)",
        now.unnamed_charged_bytes,
        None,
        now.unnamed_objects,
        None,
        None,
        None,
        None,
        None,
    )
    return View(
        elapsed_s=round(elapsed_s, 3),
        state=status["state"],
        card=status["card"]["state"],
        reason=status["card"]["reason"],
        used_share=1 - usage["free_bytes"] / max(1, usage["capacity_bytes"]),
        requests={name: rate("requests", name) for name in sorted(status["requests"])},
        hit_rate=_share(rate("cache", "lookup_hits"), rate("cache", "lookup_misses")),
        read_bytes=rate("device", "read_bytes"),
        write_bytes=rate("device", "write_bytes"),
        evicted=sum(rate("cache", name) for name in EVICTIONS),
        errors=sum(rate("errors", name) for name in status["errors"]),
        queues=status.get("queues", {}),
        journal_share=journal["used_bytes"] / max(1, journal["ring_bytes"]),
        leases=usage["leases"],
        tenants=[*sorted(lines, key=lambda line: -line.charged_bytes), rest],
    )


def _line(tenant: dict[str, Any], before: dict[str, Any] | None, elapsed_s: float) -> TenantLine:
    counters, old = tenant["counters"], (before or {}).get("counters") or {}

    def rate(name: str) -> float:
        # A tenant that was renamed counts from 0 again.
        return max(0.0, float(counters.get(name, 0) - old.get(name, 0))) / elapsed_s

    facts = (
        tenant["name"] or scope_text(tenant["scope"]),
        tenant["charged_bytes"],
        tenant["limit_bytes"],
        tenant["objects"],
    )
    if counters is None:
        return TenantLine(*facts, None, None, None, None, None)
    hits, misses = rate("lookup_hits"), rate("lookup_misses")
    return TenantLine(
        *facts,
        hits + misses,
        _share(hits, misses),
        rate("stored_bytes"),
        sum(map(rate, EVICTIONS)),
        rate("over_quota"),
    )


def _share(hits: float, misses: float) -> float | None:
    return hits / (hits + misses) if hits + misses > 0 else None
