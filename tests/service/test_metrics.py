from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.service.fake_status import STATUS, FakeSource
from xkv_gateway.service.metrics import metrics_page

if TYPE_CHECKING:
    from xkv_gateway.service.status import Status


def series(page: bytes) -> list[str]:
    return [line.rpartition(" ")[0] for line in page.decode().splitlines() if not line.startswith("#")]


def test_the_number_of_series_does_not_grow_with_the_traffic() -> None:
    before = series(metrics_page(FakeSource()))
    busy = replace(STATUS, requests={"lookup": 10**12}, cache={"hits": 10**9, "misses": 10**9}, uptime_s=1e6)
    assert series(metrics_page(FakeSource(busy))) == before


def test_every_series_stands_once_and_under_our_name() -> None:
    names = series(metrics_page(FakeSource()))
    assert len(names) == len(set(names))
    assert all(name.startswith("xkv_gateway_") for name in names)


def test_a_scrape_takes_one_snapshot() -> None:
    class Counting(FakeSource):
        taken = 0

        def status(self) -> Status:
            self.taken += 1
            return super().status()

    source = Counting()
    metrics_page(source)
    assert source.taken == 1
