from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests.service.fake_card import FakeCard, fake_sources
from tests.service.fake_status import STATUS, FakeSource
from xkv_gateway.core.counters import Counters
from xkv_gateway.core.tenancy import Held
from xkv_gateway.service import meter as metering
from xkv_gateway.service.metric_tenants import tenant_families
from xkv_gateway.service.metrics import metrics_page
from xkv_nvmeof.blockdev import DeviceCounters
from xkv_rpc import messages as m
from xkv_rpc.server import ServerCounters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client import Metric

    from xkv_gateway.service.metrics import AdminSources
    from xkv_gateway.service.status import Status

DOCS = Path(__file__).parents[2] / "docs"
ROOT = Path(__file__).parents[2]


class FakeCall:
    """What the meter looks at of a call."""

    def __init__(self, peer: bytes, request: m.Request, received_ns: int = 0) -> None:
        self.peer = peer
        self.request = request
        self.received_ns = received_ns


def look_up(sources: AdminSources, peer: bytes, request: m.Lookup, hits: int, now_ns: int = 1000) -> None:
    sources.meter.lookup(FakeCall(peer, request), request, hits, now_ns)  # type: ignore[arg-type]


def series(page: bytes) -> list[str]:
    return [line.rpartition(" ")[0] for line in page.decode().splitlines() if not line.startswith("#")]


def values(page: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def one(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


async def complete_sources() -> AdminSources:
    """The counters of the real parts, and a tenant."""
    transport = {name: value for name, value in asdict(ServerCounters()).items() if isinstance(value, int)}
    status = replace(STATUS, cache=asdict(Counters()), device=asdict(DeviceCounters()), transport=transport)
    card = FakeCard()
    await card.set_tenant("acme", b"\x01", 1000)
    return fake_sources(FakeSource(status), card)


async def test_the_number_of_series_does_not_grow_with_the_traffic() -> None:
    sources = fake_sources()
    before = series(await metrics_page(sources))
    busy = replace(STATUS, requests={"lookup": 10**12}, cache={"hits": 10**9, "misses": 10**9}, uptime_s=1e6)
    request = m.Lookup("", b"", [b"k"])
    look_up(sources, b"p", request, 1)
    assert len(series(await metrics_page(replace(sources, status=FakeSource(busy))))) == len(before) + 4


async def test_every_series_stands_once_and_under_our_name() -> None:
    names = series(await metrics_page(fake_sources()))
    assert len(names) == len(set(names))
    assert all(name.startswith("xkv_") for name in names)


async def test_all_series_exist_before_anything_has_happened() -> None:
    found = values(await metrics_page(fake_sources()))
    for name, labels in (
        ("xkv_lookup_requested_tokens_total", {"namespace": "other", "tenant": "other", "model": "other"}),
        ("xkv_lookup_hit_tokens_total", {"namespace": "other", "tenant": "other", "model": "other"}),
        ("xkv_real_reuse_gap_seconds_count", {"tenant": "other"}),
        ("xkv_real_reuse_gap_objects_count", {"tenant": "other"}),
        ("xkv_requests_total", {"op": "delete"}),
        ("xkv_errors_total", {"code": "card_offline"}),
        ("xkv_request_duration_seconds_count", {"op": "store"}),
        ("xkv_evicted_objects_total", {"cause": "quota"}),
        ("xkv_evicted_bytes_total", {"cause": "demand"}),
        ("xkv_rejected_objects_total", {"cause": "over_quota"}),
        ("xkv_lease_events_total", {"event": "expired"}),
        ("xkv_tenant_evicted_objects_total", {"tenant": "other", "cause": "quota"}),
        ("xkv_tenant_over_quota_total", {"tenant": "other"}),
        ("xkv_wipes", {}),
    ):
        assert one(found, name, **labels) == 0.0


async def test_a_scrape_takes_one_snapshot() -> None:
    class Counting(FakeSource):
        taken = 0

        def status(self) -> Status:
            self.taken += 1
            return super().status()

    source = Counting()
    await metrics_page(fake_sources(source))
    assert source.taken == 1


async def test_tokens_are_counted_for_prefix_lookups_of_connections_that_said_what_a_key_is() -> None:
    card = FakeCard()
    card.names[b"\x01"] = "acme"
    sources = fake_sources(card=card)
    sources.meter.hello(b"scheduler", m.Hello("c", "llama", 16))
    sources.meter.hello(b"worker", m.Hello("c", "llama"))
    request = m.Lookup("ns", b"\x01", [b"a", b"b", b"c"])
    look_up(sources, b"scheduler", request, 2)
    look_up(sources, b"scheduler", replace(request, mode=m.LookupMode.EACH), 1)
    look_up(sources, b"worker", request, 3)
    look_up(sources, b"stranger", replace(request, scope=b"\x02", ns=""), 1)
    found = values(await metrics_page(sources))
    labels = {"namespace": "ns", "tenant": "acme", "model": "llama"}
    assert one(found, "xkv_lookup_requested_tokens_total", **labels) == 48
    assert one(found, "xkv_lookup_hit_tokens_total", **labels) == 32
    assert one(found, "xkv_lookup_requested_keys_total", **labels) == 9
    assert one(found, "xkv_lookup_hit_keys_total", **labels) == 6
    other = {"namespace": "_default", "tenant": "other", "model": "other"}
    assert one(found, "xkv_lookup_requested_keys_total", **other) == 3
    assert one(found, "xkv_lookup_requested_tokens_total", **other) == 0


async def test_a_tenant_that_is_renamed_is_counted_under_its_new_name_from_then_on() -> None:
    card = FakeCard()
    sources = fake_sources(card=card)
    request = m.Lookup("ns", b"\x01", [b"a"])
    look_up(sources, b"p", request, 0)
    card.names[b"\x01"] = "acme"
    sources.meter.renamed()
    look_up(sources, b"p", request, 1)
    found = values(await metrics_page(sources))
    for tenant, hits in (("other", 0), ("acme", 1)):
        labels = {"namespace": "ns", "tenant": tenant, "model": "other"}
        assert one(found, "xkv_lookup_requested_keys_total", **labels) == 1
        assert one(found, "xkv_lookup_hit_keys_total", **labels) == hits


async def test_labels_that_clients_choose_are_bounded_and_so_is_memory() -> None:
    sources = fake_sources()
    for number in range(10_000):
        peer = number.to_bytes(5, "big")
        sources.meter.hello(peer, m.Hello(f"client {number}", f"model {number}", number + 1))
        look_up(sources, peer, m.Lookup(f"ns {number}", peer, [b"k"]), 0)
    page = await metrics_page(sources)
    assert len(sources.meter._peers) <= metering.PEERS_MAX
    assert len(sources.meter._known) <= metering.KNOWN_MAX
    cells = sum(len(cells) for cells in sources.meter.lookups.values())
    assert cells <= metering.LABEL_SETS_MAX
    assert len(series(page)) < 1000
    assert "ns 9999" not in page.decode()
    found = values(page)
    asked = sum(value for (name, _), value in found.items() if name == "xkv_lookup_requested_keys_total")
    assert asked == 10_000


async def test_hostile_names_cannot_break_the_page() -> None:
    card = FakeCard()
    card.names[b"\x01"] = 'a"b\\c'
    sources = fake_sources(card=card)
    sources.meter.hello(b"p", m.Hello("c", 'mo"del\n# HELP x\\', 4))
    look_up(sources, b"p", m.Lookup('n"s\n', b"\x01", [b"k"]), 1)
    found = values(await metrics_page(sources))
    labels = {"namespace": 'n"s\n', "tenant": 'a"b\\c', "model": 'mo"del\n# HELP x\\'}
    assert one(found, "xkv_lookup_hit_tokens_total", **labels) == 4


async def test_what_tenants_hold_and_lose_is_told_by_name_and_the_rest_together() -> None:
    card = FakeCard()
    await card.set_tenant("acme", b"\x01", 1000)
    await card.set_tenant("free", b"\x02", None)
    await card.set_limit(b"\x03", 5)
    card.held["a", b"\x01"] = Held(2, 200)
    card.held["b", b"\x01"] = Held(1, 100)
    card.held["b", b"\x03"] = Held(4, 400)
    card.tenant(b"\x01").counters.evicted_quota = 3  # type: ignore[union-attr]
    card.whole.evicted_quota = 10
    found = values(await metrics_page(fake_sources(card=card)))
    assert one(found, "xkv_tenants") == 3
    assert one(found, "xkv_tenant_objects", tenant="acme") == 3
    assert one(found, "xkv_tenant_charged_bytes", tenant="acme") == 300
    assert one(found, "xkv_tenant_charged_bytes", tenant="other") == 400
    assert one(found, "xkv_tenant_limit_bytes", tenant="acme") == 1000
    assert one(found, "xkv_tenant_limit_bytes", tenant="free") == float("inf")
    assert one(found, "xkv_tenant_evicted_objects_total", tenant="acme", cause="quota") == 3
    assert one(found, "xkv_tenant_evicted_objects_total", tenant="other", cause="quota") == 7


async def test_a_name_that_goes_takes_its_counts_along_and_the_rest_does_not_jump() -> None:
    card = FakeCard()
    await card.set_tenant("acme", b"\x01", 1000)
    card.whole.stored, card.whole.evicted_quota = 30, 5
    card.former.stored, card.former.evicted_quota = 20, 4
    found = values(await metrics_page(fake_sources(card=card)))
    assert one(found, "xkv_tenant_stored_total", tenant="other") == 10
    assert one(found, "xkv_tenant_evicted_objects_total", tenant="other", cause="quota") == 1


@pytest.mark.parametrize("turn", range(14))
async def test_a_name_that_goes_in_mid_scrape_is_no_step_back_of_the_rest(turn: int) -> None:
    """Between two families the loop is others': what is told as a difference is of one moment."""
    card = FakeCard()
    await card.set_tenant("acme", b"\x01", 1000)
    own = card.tenant(b"\x01").counters
    assert own is not None
    card.whole.stored, card.whole.evicted_quota = 30, 7
    own.stored, own.evicted_quota = 20, 4
    card.held["a", b"\x01"] = Held(2, 200)
    families = tenant_families(card)
    told = [next(families) for _ in range(turn)]
    card.former.add(own)
    card.names.clear()
    card.counted.clear()
    card.whole.stored += 5
    told += families
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in told
        for sample in family.samples
    }
    assert one(found, "xkv_tenant_stored_total", tenant="other") == (10 if turn else 15)
    assert one(found, "xkv_tenant_evicted_objects_total", tenant="other", cause="quota") == 3
    assert one(found, "xkv_tenant_objects", tenant="other") == (0 if turn else 2)


async def test_what_tenants_hold_that_have_a_name_and_no_label_is_in_the_rest() -> None:
    card = FakeCard(counted_max=1)
    await card.set_tenant("acme", b"\x01", 1000)
    await card.set_tenant("late", b"\x02", 1000)
    card.held["a", b"\x01"] = Held(2, 200)
    card.held["a", b"\x02"] = Held(3, 300)
    card.held["a", b"\x03"] = Held(4, 400)
    found = values(await metrics_page(fake_sources(card=card)))
    assert one(found, "xkv_tenant_objects", tenant="acme") == 2
    assert one(found, "xkv_tenant_objects", tenant="other") == 7
    assert one(found, "xkv_tenant_charged_bytes", tenant="other") == 700


async def test_the_page_says_what_prometheus_own_writer_says() -> None:
    sources = await complete_sources()
    sources.meter.hello(b"p", m.Hello("c", 'mo"del\n\\', 4))
    look_up(sources, b"p", m.Lookup("ns", b"\x01", [b"k"]), 1)

    class Families(Collector):
        def collect(self) -> Iterable[Metric]:
            return sources.families()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    theirs, ours = generate_latest(registry), await metrics_page(sources)
    assert values(ours) == values(theirs)
    comments = [{line for line in page.splitlines() if line.startswith(b"#")} for page in (ours, theirs)]
    assert comments[0] == comments[1]


async def test_no_scope_is_ever_a_label() -> None:
    card = FakeCard()
    scope = bytes(range(200, 216))
    await card.set_limit(scope, 5)
    sources = fake_sources(card=card)
    request = m.Lookup("ns", scope, [b"k"])
    look_up(sources, b"p", request, 0)
    sources.meter.stored(m.Store("ns", scope, [b"k"], [1]), ["stored"], 5)
    assert scope.hex() not in (await metrics_page(sources)).decode()


async def test_a_thousand_tenants_are_scraped_in_bounds() -> None:
    """A generous bound on time: the machine may be busy. `bench/scrape.py` measures it."""
    card = FakeCard()
    sources = fake_sources(card=card)
    for number in range(1000):
        scope = number.to_bytes(16, "big")
        await card.set_tenant(f"tenant-{number:04}", scope, 1 << 40)
        card.held["llama", scope] = Held(number, number << 16)
        look_up(sources, b"p", m.Lookup("llama", scope, [b"k"] * 64), 5)
        sources.meter.stored(m.Store("llama", scope, [b"k"], [1]), ["stored"], 5)
    began = time.process_time()
    page = await metrics_page(sources)
    assert time.process_time() - began < 5
    assert len(page) < 2_000_000
    assert one(values(page), "xkv_tenant_objects", tenant="tenant-0999") == 999


NEWS = {"xkv_loop_lag_seconds_bucket", "xkv_admission_written_bytes", "xkv_admission_budget_bytes"}
"""What both documents have to tell of, among all others."""


@pytest.mark.parametrize("document", ["grafana-dashboard.json", "alerts.yml"])
async def test_every_metric_that_the_documents_name_exists(document: str) -> None:
    text = (DOCS / document).read_text()
    if document.endswith(".json"):
        json.loads(text)
    # Names stand in expressions; what only looks like one (a uid, a title) does not begin so.
    named = set(re.findall(r"\bxkv_[a-z0-9_]+", text))
    assert len(named) >= 10
    page = values(await metrics_page(await complete_sources()))
    found = {name for name, _ in page}
    assert named <= found, sorted(named - found)
    # An expression that picks a label value that there is not would be silent for ever.
    labels = {pair for _, pairs in page for pair in pairs}
    picked = set(re.findall(r'[{,]([a-z]+)=\\?"([^"$\\]+)\\?"', text))
    assert picked
    assert picked <= labels, sorted(picked - labels)
    assert named >= NEWS, sorted(NEWS - named)


async def test_every_metric_that_the_page_names_exists() -> None:
    found = {name for name, _ in values(await metrics_page(await complete_sources()))}
    named = set(re.findall(r"`(xkv_[a-z0-9_]+)[`{]", (ROOT / "docs/metrics.md").read_text()))
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}
    assert named <= found | bases, sorted(named - found)
