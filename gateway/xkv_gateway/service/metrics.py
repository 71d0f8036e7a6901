"""The metrics page: Prometheus text, made at the moment of the scrape, one family a turn of the loop.

The number of series is bounded by our own tables (operations, error codes, causes), by the named tenants that have counters, and
by `meter.LABEL_SETS_MAX`; no other label value comes from a client, and a salt or a scope is never one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from xkv_gateway.service.metric_status import status_families
from xkv_gateway.service.metric_tenants import tenant_families
from xkv_gateway.service.metric_traffic import traffic_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric

    from xkv_gateway.card.administration import Administration
    from xkv_gateway.service.meter import Meter
    from xkv_gateway.service.status import StatusSource

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class AdminSources:
    """What the admin port tells of."""

    status: StatusSource
    meter: Meter
    administration: Administration
    clock: Callable[[], int]
    """Monotonic ns."""

    def families(self) -> Iterator[Metric]:
        """Yield every family; the status is one snapshot."""
        yield from status_families(self.status.status())
        yield from traffic_families(self.meter)
        yield from tenant_families(self.administration)


class _Family(Collector):
    """One family, made already."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _text(family: Metric) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Family(family))
    return generate_latest(registry)


async def metrics_page(sources: AdminSources) -> bytes:
    """Return the exposition text. Other tasks get their turn after each family."""
    parts = []
    for family in sources.families():
        parts.append(_text(family))
        await asyncio.sleep(0)
    return b"".join(parts)
