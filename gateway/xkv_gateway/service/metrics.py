"""Prometheus metrics, written from one status snapshot at the moment of the scrape.

The number of series is bounded by our own tables (operations, error codes, counter names): no label value comes from a
client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from xkv_gateway.service.status import Status, StatusSource

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
CARD_STATES: Final = ("online", "offline", "recovering")
USAGE_KINDS: Final = ("free", "reserved", "live", "doomed", "quarantined")
PREFIX: Final = "xkv_gateway"


class StatusCollector(Collector):
    """Turns a snapshot into metric families."""

    def __init__(self, source: StatusSource) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield every family, from one snapshot."""
        status = self._source.status()
        info = InfoMetricFamily(PREFIX, "The gateway")
        info.add_metric([], {"version": status.version})
        yield info
        yield from _gauges(status)
        for family, label, counts in (("requests", "op", status.requests), ("errors", "code", status.errors)):
            metric = CounterMetricFamily(
                f"{PREFIX}_{family}", f"{family.capitalize()} by {label}", labels=[label]
            )
            for name, count in sorted(counts.items()):
                metric.add_metric([name], count)
            yield metric
        for group, counters in (
            ("cache", status.cache),
            ("control", status.transport),
            ("device", status.device),
        ):
            for name, count in sorted(counters.items()):
                yield CounterMetricFamily(
                    f"{PREFIX}_{group}_{name}", f"{group}: {name.replace('_', ' ')}", value=count
                )

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: registering must not take a snapshot."""
        return iter(())


def _gauges(status: Status) -> Iterator[Metric]:
    usage, card = status.usage, status.card
    yield GaugeMetricFamily(f"{PREFIX}_uptime_seconds", "Time since the start", value=status.uptime_s)
    yield GaugeMetricFamily(f"{PREFIX}_ready", "1 if requests are served from the card", value=status.ready)
    states = GaugeMetricFamily(
        f"{PREFIX}_card_state", "1 for the state that the card is in", labels=["state"]
    )
    for state in CARD_STATES:
        states.add_metric([state], card.state == state)
    yield states
    yield GaugeMetricFamily(f"{PREFIX}_card_size_bytes", "Size of the namespace", value=card.size_bytes)
    restarts = card.soft_card.restarts if card.soft_card else 0
    yield CounterMetricFamily(
        f"{PREFIX}_soft_card_restarts", "Restarts of the soft card's process", value=restarts
    )
    yield from _run_metrics(status)
    where = GaugeMetricFamily(f"{PREFIX}_usage_bytes", "Where the card's bytes are", labels=["kind"])
    for kind in USAGE_KINDS:
        where.add_metric([kind], getattr(usage, f"{kind}_bytes"))
    yield where
    yield GaugeMetricFamily(f"{PREFIX}_capacity_bytes", "Bytes for objects", value=usage.capacity_bytes)
    yield GaugeMetricFamily(f"{PREFIX}_objects", "Objects held", value=usage.objects)
    yield GaugeMetricFamily(
        f"{PREFIX}_objects_max", "Objects that the index has room for", value=usage.objects_max
    )
    yield GaugeMetricFamily(f"{PREFIX}_leases", "Leases that live", value=usage.leases)
    yield GaugeMetricFamily(f"{PREFIX}_leased_bytes", "Bytes under leases", value=usage.leased_bytes)


def _run_metrics(status: Status) -> Iterator[Metric]:
    card = status.card
    run, recovery, journal = card.run, card.recovery, card.journal
    for name, text, value in (
        ("warm", "1 if objects of an earlier run were found at the start", status.warm),
        ("card_epoch", "Runs since the card was formatted", run.epoch),
        ("writes_in_seconds", "While recovering: time until writes are served", run.writes_in_s),
        ("recovery_seconds", "Time that reading the index took at the start", recovery.duration_s),
        ("recovered_objects", "Objects found at the start", recovery.objects),
        (
            "recovery_dropped_objects",
            "Objects given up at the start because of damage",
            recovery.dropped_objects,
        ),
        ("recovery_damages", "Damaged structures found at the start", len(recovery.damage)),
        ("journal_ring_bytes", "Length of the journal's ring", journal.ring_bytes),
        ("journal_used_bytes", "What a recovery would need of it", journal.used_bytes),
        ("checkpoint_objects", "Objects in the last checkpoint of this run", journal.checkpoint_objects),
    ):
        yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)
    for name, text, value in (
        ("journal_batches", "Batches written to the journal", journal.batches),
        ("journal_batch_bytes", "Bytes of these batches", journal.batch_bytes),
        ("checkpoints", "Checkpoints completed", journal.checkpoints),
    ):
        yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def metrics_page(source: StatusSource) -> bytes:
    """Return the exposition text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(source))
    return generate_latest(registry)
