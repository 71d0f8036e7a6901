"""The control service over a simulated card: stores of nothing, and what is said of objects that went bad."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from tests.service.test_drain import LIMITS, SETTINGS, UNIT
from tests.sim.gateway import RESERVED_BYTES, Gateway, Parts
from tests.sim.loop import SimLoop
from tests.sim.medium import SECTOR_BYTES, Medium
from xkv_rpc import messages as m

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def played(work: Callable[[Gateway, Medium], Awaitable[None]]) -> None:
    loop = SimLoop(random.Random(1))

    async def run() -> None:
        medium = Medium(RESERVED_BYTES + LIMITS.capacity_au * UNIT, 512)
        gateway = Gateway(loop, medium, random.Random(1), SETTINGS, Parts(), lambda _: None)
        await work(gateway, medium)
        await gateway.kill()

    loop.run(run())
    loop.close()


def test_stores_of_nothing_beside_others_leave_nothing_behind() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        del medium
        nothing = m.Store("", b"", [], [])
        answers = await asyncio.gather(
            gateway.ask(1, nothing),
            gateway.ask(1, m.Store("", b"", [b"a"], [UNIT]), [bytes(UNIT)]),
            gateway.ask(1, nothing),
            gateway.ask(1, m.Load("", b"", [b"a"])),  # waits for the store
            gateway.ask(1, nothing),  # waits behind it
        )
        results = [reply.results for reply, _ in answers if isinstance(reply, m.StoreReply | m.LoadReply)]
        assert results == [[], ["stored"], [], ["ok"], []]
        for _ in range(3):  # the store of nothing is admitted while the one before it is being counted off
            await gateway.ask(1, m.Store("", b"", [b"a"], [UNIT]), [bytes(UNIT)])
            await gateway.ask(1, nothing)
        await asyncio.sleep(1)
        assert not gateway.service._orders

    played(work)


def test_an_object_that_went_bad_has_no_size() -> None:
    async def work(gateway: Gateway, medium: Medium) -> None:
        payload = random.Random(1).randbytes(UNIT)
        await gateway.ask(1, m.Store("", b"", [b"good", b"bad"], [UNIT, UNIT]), [bytes(UNIT), payload])
        place = next(at for at in range(0, medium.size_bytes, UNIT) if medium.read(at, UNIT) == payload)
        medium.damage(place // SECTOR_BYTES, 0)
        reply, payloads = await gateway.ask(1, m.Load("", b"", [b"good", b"bad", b"none"]))
        assert reply == m.LoadReply(["ok", "corrupt", "miss"], [UNIT, None, None])
        assert [bytes(each) for each in payloads] == [bytes(UNIT)]

    played(work)
