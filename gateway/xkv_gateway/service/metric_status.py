"""Metric families that tell a status snapshot: the gateway, the card, its room, its journal, what was done and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from xkv_rpc.errors import ErrorCode
from xkv_rpc.messages import OPS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from xkv_gateway.service.status import Status

PREFIX: Final = "xkv"
CARD_STATES: Final = ("online", "offline", "recovering")
USAGE_KINDS: Final = ("free", "reserved", "live", "doomed", "quarantined")
EVICTION_CAUSES: Final = ("watermark", "demand", "quota", "ttl")
REJECTION_CAUSES: Final = ("over_quota", "no_space", "too_large", "in_progress", "budget")
QUEUES: Final = ("requests", "loads", "stores")
LEASE_EVENTS: Final = ("granted", "renewed", "released", "expired", "refused")
TICKET_EVENTS: Final = ("granted", "committed", "aborted", "expired", "refused")


def status_families(status: Status) -> Iterator[Metric]:
    """Yield the families of one snapshot."""
    info = InfoMetricFamily(PREFIX, "The gateway")
    info.add_metric([], {"version": status.version})
    yield info
    yield from _card(status)
    yield from _room(status)
    yield from _journal(status)
    yield from _cache(status.cache)
    queues = dict.fromkeys(QUEUES, 0) | status.queues
    yield _states("in_flight", "What is under way", "kind", queues.items())
    requests = dict.fromkeys(OPS, 0) | status.requests
    yield _by_label("requests", "Requests that were carried out", "op", requests)
    errors = dict.fromkeys((code.value for code in ErrorCode), 0) | status.errors
    yield _by_label("errors", "Error replies", "code", errors)
    for group, what, counters in (
        ("control", "control port", status.transport),
        ("card_io", "commands to the card", status.device),
    ):
        for name, count in sorted(counters.items()):
            yield _counter(f"{group}_{name}", f"{what}: {name.replace('_', ' ')}", count)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _by_label(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"{PREFIX}_{name}", f"{text}, by {label}", labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def _states(name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
    for value, number in values:
        family.add_metric([value], number)
    return family


def readiness_families(card_state: str, *, ready: bool) -> Iterator[Metric]:
    """Yield what is known even of a gateway that has no card yet."""
    yield _gauge("ready", "1 if requests are served from the card", ready)
    states = ((state, card_state == state) for state in CARD_STATES)
    yield _states("card_state", "1 for the state that the card is in", "state", states)


def _card(status: Status) -> Iterator[Metric]:
    card = status.card
    yield _gauge("uptime_seconds", "Time since the start", status.uptime_s)
    yield from readiness_families(card.state, ready=status.ready)
    yield _gauge("card_state_age_seconds", "How long it has been in that state", card.state_age_s)
    yield _gauge("card_size_bytes", "Size of the namespace", card.size_bytes)
    yield _gauge("card_epoch", "Runs since the card was formatted", card.run.epoch)
    yield _gauge("writes_in_seconds", "While recovering: time until writes are served", card.run.writes_in_s)
    restarts = card.soft_card.restarts if card.soft_card else 0
    yield _counter("soft_card_restarts", "Restarts of the soft card's process", restarts)
    if status.target is not None:
        right = status.target.state == "right"
        yield _gauge("target_right", "1 if the SPDK target is as it shall be", right)
        yield _counter(
            "target_remade", "Times that something of the target was made anew", status.target.remade
        )


def _room(status: Status) -> Iterator[Metric]:
    usage = status.usage
    kinds = ((kind, getattr(usage, f"{kind}_bytes")) for kind in USAGE_KINDS)
    yield _states("usage_bytes", "Where the card's bytes are", "kind", kinds)
    for name, text, value in (
        ("capacity_bytes", "Bytes for objects", usage.capacity_bytes),
        ("objects", "Objects held", usage.objects),
        ("objects_max", "Objects that the index has room for", usage.objects_max),
        ("leases", "Leases that live", usage.leases),
        ("leased_bytes", "Bytes under leases", usage.leased_bytes),
        ("tickets", "Tickets whose room clients write to themselves", usage.tickets),
        ("ticket_bytes", "Payload bytes reserved by tickets", usage.ticket_bytes),
        (
            "admission_budget_bytes",
            "Payload bytes that stores may write in 24 hours; 0: no limit",
            status.admission.bytes_per_day,
        ),
        (
            "admission_written_bytes",
            "Payload bytes that they have written in the last 24 hours",
            status.admission.written_bytes,
        ),
    ):
        yield _gauge(name, text, value)


def _journal(status: Status) -> Iterator[Metric]:
    recovery, journal = status.card.recovery, status.card.journal
    for name, text, value in (
        ("warm", "1 if objects of an earlier run were found at the start", status.warm),
        ("recovery_seconds", "Time that reading the index took at the start", recovery.duration_s),
        ("recovered_objects", "Objects found at the start", recovery.objects),
        ("recovery_dropped_objects", "Objects given up at the start: damage", recovery.dropped_objects),
        ("recovery_damages", "Damaged structures found at the start", len(recovery.damage)),
        ("journal_ring_bytes", "Length of the journal's ring", journal.ring_bytes),
        ("journal_used_bytes", "What a recovery would need of it", journal.used_bytes),
        ("checkpoint_objects", "Objects in the last checkpoint of this run", journal.checkpoint_objects),
    ):
        yield _gauge(name, text, value)
    for name, text, value in (
        ("journal_batches", "Batches written to the journal", journal.batches),
        ("journal_batch_bytes", "Bytes of these batches", journal.batch_bytes),
        ("checkpoints", "Checkpoints completed", journal.checkpoints),
    ):
        yield _counter(name, text, value)


def _cache(counters: Mapping[str, int]) -> Iterator[Metric]:
    """Yield the engine's counters; those that have a family of their own go there."""
    left = dict(counters)
    # A cause that the engine learns later is told as well.
    causes = {
        name.removeprefix("evicted_").removesuffix("_bytes") for name in left if name.startswith("evicted_")
    }
    objects = {cause: left.pop(f"evicted_{cause}", 0) for cause in causes.union(EVICTION_CAUSES)}
    evicted = {cause: left.pop(f"evicted_{cause}_bytes", 0) for cause in objects}
    yield _by_label("evicted_objects", "Objects evicted", "cause", objects)
    yield _by_label("evicted_bytes", "Payload bytes of evicted objects", "cause", evicted)
    rejected = {cause: left.pop(cause, 0) for cause in REJECTION_CAUSES}
    yield _by_label("rejected_objects", "Objects that stores did not take", "cause", rejected)
    events = {event: left.pop(f"leases_{event}", 0) for event in LEASE_EVENTS}
    yield _by_label("lease_events", "What happened to leases", "event", events)
    events = {event: left.pop(f"tickets_{event}", 0) for event in TICKET_EVENTS}
    yield _by_label("ticket_events", "What happened to tickets", "event", events)
    for name, count in sorted(left.items()):
        yield _counter(f"cache_{name}", f"cache: {name.replace('_', ' ')}", count)
