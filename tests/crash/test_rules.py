"""Rules of eviction and admission that are changed while the run before has yet to settle."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tests.crash.bench import FAULTS
from tests.crash.device import Fuse, Kind
from tests.crash.explore import READ, SETTLED_S, commands_of, land
from tests.crash.scenarios import SCENARIOS
from xkv_gateway.card.fence import CardLost
from xkv_gateway.core.tenancy import EvictionRules

if TYPE_CHECKING:
    from tests.crash.bench import CrashBench

RULES = EvictionRules(trigger_watermark=0.6)
BYTES_PER_DAY = 12_345


def test_they_still_hold_when_late_records_have_made_the_index_be_read_again() -> None:
    scenario = next(each for each in SCENARIOS if each.name == "store")
    replaced: list[bool] = []

    async def work(bench: CrashBench) -> None:
        blown: asyncio.Future[None] = bench.loop.create_future()
        bench.fuse.on_blow = lambda: None if blown.done() else blown.set_result(None)
        acting = asyncio.ensure_future(scenario.act(bench))
        await asyncio.wait((acting, blown), return_when=asyncio.FIRST_COMPLETED)
        bench.told = bench.told.copy()
        for number in list(bench.medium.in_flight):
            bench.loop.call_later(READ, land, bench, number, 0.0, 1.0)
        life = await bench.open("next")
        before = life.store.engine
        before.set_rules(RULES, BYTES_PER_DAY)
        with contextlib.suppress(CardLost):  # a heartbeat that lands late looks like an owner that lives
            await life.owned()
        after = life.store.engine
        replaced.append(after is not before)
        assert after.rules == RULES
        assert after.budget.bytes_per_day == BYTES_PER_DAY
        await asyncio.sleep(SETTLED_S + FAULTS.settle_ns / 1e9)
        acting.cancel()
        await life.kill()

    for at in commands_of(scenario).writes()[-4:]:
        scenario.base().bench(Fuse(at, Kind.DEATH)).run(work)
    assert True in replaced
