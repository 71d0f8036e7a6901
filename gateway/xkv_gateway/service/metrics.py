"""The metrics page: Prometheus text, made at the moment of the scrape, one family a turn of the loop.

The number of series is bounded by our own tables (operations, error codes, causes), by the named tenants that have counters, and
by `meter.LABEL_SETS_MAX`; no other label value comes from a client, and a salt or a scope is never one.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from xkv_gateway.service.metric_status import status_families
from xkv_gateway.service.metric_tenants import tenant_families
from xkv_gateway.service.metric_traffic import traffic_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client import Metric

    from xkv_gateway.card.administration import Administration
    from xkv_gateway.service.meter import Meter
    from xkv_gateway.service.status import StatusSource

ESCAPED_MAX: Final = 8192
"""Label values remembered in their escaped form: the same ones stand in every scrape."""
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


@lru_cache(maxsize=ESCAPED_MAX)
def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return "+Inf" if value == math.inf else repr(float(value))


def family_text(family: Metric) -> str:
    """Return the exposition of one family, as `prometheus_client` writes it: several times faster, for many samples."""
    name, kind = family.name, family.type
    if kind == "counter":
        name += "_total"
    elif kind == "info":
        name, kind = f"{name}_info", "gauge"
    help_text = family.documentation.replace("\\", "\\\\").replace("\n", "\\n")
    lines = [f"# HELP {name} {help_text}\n# TYPE {name} {kind}"]
    for sample in family.samples:
        labels = ",".join([f'{label}="{_escape(value)}"' for label, value in sample.labels.items()])
        named = f"{sample.name}{{{labels}}}" if labels else sample.name
        lines.append(f"{named} {_number(sample.value)}")
    lines.append("")
    return "\n".join(lines)


async def metrics_page(sources: AdminSources) -> bytes:
    """Return the exposition text. Other tasks get their turn after each family."""
    parts = []
    for family in sources.families():
        parts.append(family_text(family))
        await asyncio.sleep(0)
    return "".join(parts).encode()
