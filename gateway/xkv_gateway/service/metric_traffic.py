"""Metric families of what the control port does: lookups by namespace, tenant and model, reuse gaps, latencies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from xkv_gateway.service.meter import LATENCY_BITS, OTHER
from xkv_gateway.service.metric_status import PREFIX
from xkv_gateway.service.reuse import TenantReuse
from xkv_rpc.messages import OP_OF

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from xkv_gateway.service.meter import Meter

LABELS: Final = ("namespace", "tenant", "model")
NS_PER_S: Final = 1e9


def traffic_families(meter: Meter) -> Iterator[Metric]:
    """Yield the families."""
    yield from _lookups(meter)
    yield from _reuse(meter)
    latency = HistogramMetricFamily(
        f"{PREFIX}_request_duration_seconds", "From the arrival of a request to its reply", labels=["op"]
    )
    for kind, histogram in meter.latencies.items():
        buckets = histogram.buckets(*LATENCY_BITS, NS_PER_S)
        latency.add_metric([OP_OF[kind]], buckets, histogram.total / NS_PER_S)
    yield latency
    lag = HistogramMetricFamily(f"{PREFIX}_loop_lag_seconds", "By how much the loop came too late to a turn")
    lag.add_metric([], meter.loop_lag.buckets(NS_PER_S), meter.loop_lag.total / NS_PER_S)
    yield lag
    yield GaugeMetricFamily(
        f"{PREFIX}_loop_lag_max_seconds",
        "... at the worst, since the start",
        meter.loop_lag_max_ns / NS_PER_S,
    )


def _lookups(meter: Meter) -> Iterator[Metric]:
    families = [
        CounterMetricFamily(f"{PREFIX}_lookup_{name}", text, labels=LABELS)
        for name, text in (
            ("requested_keys", "Keys that lookups asked for"),
            ("hit_keys", "... of which so many were held"),
            ("requested_tokens", "Tokens of the prompts that lookups asked for"),
            ("hit_tokens", "... of which so many were held"),
        )
    ]
    for labels, cells in list(meter.lookups.items()):
        sums = [0, 0, 0, 0]
        for cell in cells.values():
            sums[0] += cell.requested_keys
            sums[1] += cell.hit_keys
            sums[2] += cell.requested_keys * cell.tokens_per_key
            sums[3] += cell.hit_keys * cell.tokens_per_key
        for family, value in zip(families, sums, strict=True):
            family.add_metric(labels, value)
    yield from families


def _reuse(meter: Meter) -> Iterator[Metric]:
    tenants = {OTHER: TenantReuse()} | meter.reuse.tenants
    seconds = HistogramMetricFamily(
        f"{PREFIX}_real_reuse_gap_seconds",
        "From the last write of an object to its next read",
        labels=["tenant"],
    )
    objects = HistogramMetricFamily(
        f"{PREFIX}_real_reuse_gap_objects",
        "Objects that the tenant wrote and read between the last write of one and its next read",
        labels=["tenant"],
    )
    for name, tenant in tenants.items():
        seconds.add_metric([name], tenant.seconds.buckets(NS_PER_S), tenant.seconds.total / NS_PER_S)
        objects.add_metric([name], tenant.objects.buckets(1.0), tenant.objects.total)
    yield seconds
    yield objects
