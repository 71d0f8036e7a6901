"""Prometheus metrics. The number of series is bounded: labels are our own words, and names of tenants up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from xkv_frontend.core.names import TenantName

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
TENANTS_MAX: Final = 1000
"""Tenants with series of their own; the others are counted together."""
OTHERS: Final = "_other"
NOBODY: Final = "_none"
"""Requests of callers that were not authenticated. Neither word can be a tenant's name."""
BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
PREFIX: Final = "xkv_frontend"


class Metrics:
    """The counters of one front end, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=False)
        self._named: set[str] = set()
        self._requests = Counter(
            f"{PREFIX}_requests", "Requests that ended", ["tenant", "route", "status"], registry=registry
        )
        self._refusals = Counter(f"{PREFIX}_refusals", "Requests refused here", ["code"], registry=registry)
        self._outcomes = Counter(f"{PREFIX}_outcomes", "How requests ended", ["outcome"], registry=registry)
        self._in_flight = Gauge(f"{PREFIX}_in_flight", "Requests that run", ["tenant"], registry=registry)
        self._bytes = Counter(
            f"{PREFIX}_bytes", "Bytes of bodies", ["tenant", "direction"], registry=registry
        )
        self._first = Histogram(
            f"{PREFIX}_first_byte_seconds",
            "Time to the first byte of the reply",
            ["route"],
            registry=registry,
            buckets=BUCKETS_S,
        )

    def label(self, tenant: TenantName | None) -> str:
        """Return the label of a tenant: its name, or a word for the many."""
        if tenant is None:
            return NOBODY
        if tenant not in self._named:
            if len(self._named) >= TENANTS_MAX:
                return OTHERS
            self._named.add(tenant)
        return tenant

    def began(self, tenant: TenantName) -> None:
        """A request was admitted."""
        self._in_flight.labels(self.label(tenant)).inc()

    def released(self, tenant: TenantName) -> None:
        """A request that was admitted has ended."""
        self._in_flight.labels(self.label(tenant)).dec()

    def ended(
        self,
        tenant: TenantName | None,
        route: str,
        status: int,
        outcome: str,
        *,
        sent: int,
        received: int,
        first_s: float | None,
    ) -> None:
        """Count a request; `status` 0: no answer was begun. Bytes: `received` from the client, `sent` to it."""
        label = self.label(tenant)
        self._requests.labels(label, route, f"{status // 100}xx" if status else "none").inc()
        self._outcomes.labels(outcome).inc()
        self._bytes.labels(label, "in").inc(received)
        self._bytes.labels(label, "out").inc(sent)
        if first_s is not None:
            self._first.labels(route).observe(first_s)

    def refused(self, code: str) -> None:
        """Count a refusal by its code."""
        self._refusals.labels(code).inc()

    def page(self) -> bytes:
        """Return the text of a scrape."""
        return generate_latest(self.registry)
