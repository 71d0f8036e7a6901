"""Metric families of tenants: what they hold, may hold, and lost. Only named ones with counters are told apart."""

from __future__ import annotations

import math
from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from xkv_gateway.card.administration import WipeStage
from xkv_gateway.core.tenancy import Held
from xkv_gateway.service.meter import OTHER
from xkv_gateway.service.metric_status import EVICTION_CAUSES, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from xkv_gateway.card.administration import Administration
    from xkv_gateway.core.counters import Counters
    from xkv_gateway.core.tenancy import TenantCounters, TenantInfo

REGISTERED_READ_MAX: Final = 16_384
"""Registered tenants that one scrape looks at, for those with a name."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """All tenants at one moment: between two families others have their turn, and what is `other` is a difference."""

    registered: int
    named: list[TenantInfo]
    """Those that get a label; their counters are copies."""
    rest: Held
    """What those hold that get none."""
    leases: int
    whole: Counters
    former: TenantCounters

    @classmethod
    def of(cls, administration: Administration) -> _Snapshot:
        named, uncounted = _named(administration)
        objects, charged_bytes = administration.usage_of_unnamed()
        return cls(
            administration.tenants(0, 1).total,
            [replace(tenant, counters=copy(tenant.counters)) for tenant in named],
            Held(objects + uncounted.objects, charged_bytes + uncounted.charged_bytes),
            administration.usage().leases,
            copy(administration.counters()),
            copy(administration.counters_of_former()),
        )


def tenant_families(administration: Administration) -> Iterator[Metric]:
    """Yield the families."""
    snapshot = _Snapshot.of(administration)
    yield GaugeMetricFamily(
        f"{PREFIX}_tenants", "Registered tenants: with a quota, a name, or both", value=snapshot.registered
    )
    yield GaugeMetricFamily(
        f"{PREFIX}_tenants_complete",
        "0 if damage took quotas away and nobody has confirmed those that are left",
        value=administration.tenants_known,
    )
    yield from _held(snapshot)
    yield from _events(snapshot)
    yield from _wipes(administration)


def _named(administration: Administration) -> tuple[list[TenantInfo], Held]:
    """Return the tenants that get a label, and what those hold together that have a name and get none."""
    named: list[TenantInfo] = []
    objects = charged_bytes = 0
    cursor: int | None = 0
    looked_at = 0
    while cursor is not None and looked_at < REGISTERED_READ_MAX:
        page = administration.tenants(cursor)
        for info in page.items:
            if info.name is not None and info.counters is not None:
                named.append(info)
            elif info.name is not None:
                objects += info.held.objects
                charged_bytes += info.held.charged_bytes
        looked_at += len(page.items)
        cursor = page.next_cursor
    return named, Held(objects, charged_bytes)


def _held(snapshot: _Snapshot) -> Iterator[Metric]:
    named, rest = snapshot.named, snapshot.rest
    for name, text, values, other in (
        ("objects", "Objects held", [t.held.objects for t in named], rest.objects),
        (
            "charged_bytes",
            "Bytes charged: whole units",
            [t.held.charged_bytes for t in named],
            rest.charged_bytes,
        ),
        (
            "leases",
            "Leases that live",
            [t.leases for t in named],
            snapshot.leases - sum(t.leases for t in named),
        ),
        ("leased_bytes", "Bytes under leases", [t.leased_bytes for t in named], None),
        ("limit_bytes", "What it may hold; +Inf: everything", [_limit(t) for t in named], None),
    ):
        family = GaugeMetricFamily(f"{PREFIX}_tenant_{name}", text, labels=["tenant"])
        for tenant, value in zip(named, values, strict=True):
            family.add_metric([tenant.name or ""], value)
        if other is not None:
            family.add_metric([OTHER], other)
        yield family


def _limit(tenant: TenantInfo) -> float:
    return math.inf if tenant.effective_limit_bytes is None else tenant.effective_limit_bytes


def _events(snapshot: _Snapshot) -> Iterator[Metric]:
    """What is of no tenant with a label is `other`: not what was counted under a name that is gone, or `other` would jump."""
    named, whole, former = snapshot.named, snapshot.whole, snapshot.former
    evicted = CounterMetricFamily(
        f"{PREFIX}_tenant_evicted_objects", "Objects evicted, by cause", labels=["tenant", "cause"]
    )
    left = Counter(
        {
            cause: _count(whole, f"evicted_{cause}") - _count(former, f"evicted_{cause}")
            for cause in EVICTION_CAUSES
        }
    )
    for tenant in named:
        for cause in EVICTION_CAUSES:
            count = _count(tenant.counters, f"evicted_{cause}")
            left[cause] -= count
            evicted.add_metric([tenant.name or "", cause], count)
    for cause in EVICTION_CAUSES:
        evicted.add_metric([OTHER, cause], left[cause])
    yield evicted
    for name, text in (
        ("over_quota", "Objects that its quota did not let in"),
        ("stored", "Objects stored"),
        ("stored_bytes", "Payload bytes stored"),
        ("load_hits", "Objects that loads found"),
        ("load_misses", "Objects that loads did not find"),
    ):
        family = CounterMetricFamily(f"{PREFIX}_tenant_{name}", text, labels=["tenant"])
        rest = _count(whole, name) - _count(former, name)
        for tenant in named:
            count = _count(tenant.counters, name)
            rest -= count
            family.add_metric([tenant.name or ""], count)
        family.add_metric([OTHER], rest)
        yield family


def _count(counters: object, name: str) -> int:
    return int(getattr(counters, name, 0))


def _wipes(administration: Administration) -> Iterator[Metric]:
    wipes = administration.wipes()
    under_way = [wipe for wipe in wipes if wipe.stage in {WipeStage.BEGUN, WipeStage.DURABLE}]
    for name, text, value in (
        ("wipes", "Wipes under way", len(under_way)),
        ("wipe_left_bytes", "Bytes that they have still to erase", sum(w.left_bytes for w in under_way)),
        (
            "wipe_waiting_bytes",
            "... of which so many wait for leases and I/O",
            sum(w.waiting_bytes for w in under_way),
        ),
    ):
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
