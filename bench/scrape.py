"""How long a scrape takes with a thousand named tenants, and how large it is; and what a lookup pays for being counted."""

from __future__ import annotations

import http.client
import json
import statistics
import time
import timeit
from typing import TYPE_CHECKING, Any, Final

from bench.gateway import running_gateway
from bench.harness import at_most, work_folder
from xkv_gateway.service.meter import Meter
from xkv_rpc import messages as m
from xkv_rpc.client import Client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.gateway import RunningGateway

TENANTS: Final = 1000
SCRAPES: Final = 15
SCRAPE_MS_MAX: Final = 200
PAGE_MB_MAX: Final = 2
COUNTED_NS_MAX: Final = 1000
COUNTED: Final = 20_000


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    del argv
    with work_folder() as folder, running_gateway(folder, f"soft:{folder}/card.img?size=4GiB") as gateway:
        _fill(gateway)
        times, page = [], b""
        for _ in range(SCRAPES):
            began = time.perf_counter()
            page = _ask(gateway, "GET", "/metrics")
            times.append(1e3 * (time.perf_counter() - began))
    scrape_ms, page_mb = statistics.median(times), len(page) / 1e6
    counted_ns = _counted_ns()
    return {
        "tenants": TENANTS,
        "scrape_ms": scrape_ms,
        "scrape_max_ms": max(times),
        "page_mb": page_mb,
        "lines": page.count(b"\n"),
        "counting_a_lookup_ns": counted_ns,
        "bars": [
            at_most("scrape of 1,000 tenants, ms", scrape_ms, SCRAPE_MS_MAX),
            at_most("size of that page, MB", page_mb, PAGE_MB_MAX),
            at_most("counting one lookup, ns", counted_ns, COUNTED_NS_MAX),
        ],
    }


def _fill(gateway: RunningGateway) -> None:
    with Client(f"tcp://127.0.0.1:{gateway.port}") as client:
        client.call(m.Hello("bench", "meta-llama/Llama-3.1-8B-Instruct", 16))
        for number in range(TENANTS):
            scope = number.to_bytes(16, "big")
            body = json.dumps({"scope": scope.hex(), "limit_bytes": 1 << 30})
            _ask(gateway, "PUT", f"/v1/tenants/tenant-{number:04}", body)
            client.store("llama-3.1-8b", scope, [b"k"], [b"x"])
            client.lookup("llama-3.1-8b", scope, [b"k", b"l"], lease_ms=0)
            client.load("llama-3.1-8b", scope, [b"k"])


def _ask(gateway: RunningGateway, method: str, path: str, body: str | None = None) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.admin_port, timeout=30)
    try:
        connection.request(method, path, body)
        return connection.getresponse().read()
    finally:
        connection.close()


class _Call:
    peer = b"peer"
    received_ns = 0


def _counted_ns() -> float:
    meter, call = Meter(), _Call()
    meter.hello(call.peer, m.Hello("bench", "model", 16))  # type: ignore[arg-type]
    request = m.Lookup("ns", bytes(16), [bytes(32)] * 200)
    count = meter.lookup
    both = timeit.repeat(lambda: count(call, request, 100, 123_456), number=COUNTED, repeat=9)  # type: ignore[arg-type]
    nothing = timeit.repeat(lambda: None, number=COUNTED, repeat=9)
    return 1e9 * (min(both) - min(nothing)) / COUNTED
