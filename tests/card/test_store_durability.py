"""Who waits for a record."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.service.test_drain import LIMITS
from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.save import Save
from xkv_gateway.card.store import CardStore
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.types import BeginStore, StoreStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import Lsn


class AtOnce:
    """A journal whose records are durable the moment they are submitted."""

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:
        durable(last_lsn)

    def cover(self, done: Callable[[], None]) -> None:
        done()


def test_who_waits_for_a_record_that_is_durable_already_does_not_wait() -> None:
    async def work(loop: SimLoop) -> None:
        device = SimDevice(loop, Medium(32 * 4096, 512), random.Random(1), Faults())
        engine = Engine(LIMITS, digest_secret=bytes(32), entropy=random.Random(1).randbytes)
        area = DataArea(0, LIMITS.au_bytes, 512)
        store = CardStore(engine, device, area, AtOnce(), loop.clock)
        request = BeginStore("", b"", [b"key"], [100])
        save = Save(store, request, [memoryview(bytes(100))], loop.clock() + 1_000_000)
        assert await save.run() == [StoreStatus.STORED]
        before_ns = loop.clock()
        async with asyncio.timeout(60):
            await store.durable(engine.last_lsn, before_ns + 1_000_000_000)
        assert loop.clock() == before_ns
        store.close()

    loop = SimLoop(random.Random(1))
    loop.run(work(loop))
    loop.close()
