"""Runs of a gateway's card session on a simulated medium, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import Medium, Written
from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.load import Load
from xkv_gateway.card.opening import FormatWish, OpenOptions, open_card
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.save import Save
from xkv_gateway.card.store import CardStore
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import BeginLoad, BeginStore, EngineLimits, LoadStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.session import CardSession

MIB: Final = 1 << 20
SIZE_BYTES: Final = 64 * MIB
KEEP_ALIVE_MS: Final = 1000
PERFECT: Final = Faults(settle_ns=KEEP_ALIVE_MS * 1_000_000)


def limits_of(layout: Layout) -> EngineLimits:
    return EngineLimits(
        capacity_au=layout.capacity_au,
        au_bytes=layout.au_bytes,
        max_objects=layout.max_objects,
        object_bytes_max=MIB,
        lease_ttl_max_ns=60_000_000_000,
        leases_per_scope_max=100,
        leased_bytes_per_scope_max=SIZE_BYTES,
        eviction=EvictionRules(trigger_watermark=0.95, eviction_ratio=0.05),
    )


@dataclass(eq=False)
class Run:
    """One gateway's life on a card."""

    device: SimDevice
    session: CardSession
    store: CardStore
    task: asyncio.Task[None]

    async def owned(self) -> None:
        """Return once it owns the card; raise what kept it from that."""
        owned = asyncio.create_task(self.session._owned.wait())
        await asyncio.wait((owned, self.task), return_when=asyncio.FIRST_COMPLETED)
        owned.cancel()
        if self.task.done():
            self.task.result()

    async def save(self, key: bytes, payload: bytes) -> str:
        request = BeginStore("ns", b"", [key], [len(payload)])
        save = Save(self.store, request, [memoryview(payload)], self.store.clock() + 5_000_000_000)
        return (await save.run())[0].value

    async def load(self, key: bytes) -> bytes | None:
        loaded = (await Load(self.store, BeginLoad("ns", b"", [key], None), None).run())[0]
        return bytes(loaded.payload) if loaded.status is LoadStatus.OK and loaded.payload else None

    async def kill(self) -> None:
        """End the process on the spot."""
        self.device.die()
        await self._end()

    async def stop(self) -> bool:
        """End in order."""
        try:
            return await self.session.stop()
        finally:
            await self._end()
            await self.device.aclose()

    async def _end(self) -> None:
        self.store.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Bench:
    """A medium and the runs on it."""

    def __init__(self, seed: int = 1, size_bytes: int = SIZE_BYTES) -> None:
        self.rng = random.Random(seed)
        self.loop = SimLoop(random.Random(seed))
        self.medium = Medium(size_bytes, 4096)
        self.wall_ns = 1
        """What the clock of the host adds to the time of the loop."""

    def play(self, work: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        try:
            self.loop.run(work(self))
        finally:
            self.loop.close()

    def device(self) -> SimDevice:
        return SimDevice(self.loop, self.medium, random.Random(self.rng.random()), PERFECT)

    def overwrite(self, offset_bytes: int, data: bytes) -> None:
        """Change what is on the medium, past everybody."""
        number = self.medium.send(write := Written(offset_bytes, data))
        self.medium.execute(number)
        write.returned = True
        self.medium.flush({id(write)})

    async def open(
        self,
        name: str = "host",
        *,
        takeover: bool = False,
        exclusive: bool = False,
        device: SimDevice | None = None,
    ) -> Run:
        device = device or self.device()
        options = OpenOptions(
            owner=Owner(name, f"nqn.2026-01.test:{name}", bytes(16), bytes(16), 1, KEEP_ALIVE_MS, 0),
            limits_of=limits_of,
            clock=self.loop.clock,
            wall_clock=lambda: self.wall_ns + self.loop.clock(),
            entropy=self.rng.randbytes,
            takeover=takeover,
            exclusive=exclusive,
            format_blank=FormatWish(64 << 10, None),
        )
        session = await open_card(device, CardBlocks(device, self.loop.clock), options)
        layout = session.superblock.layout
        area = DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)
        store = CardStore(session.engine, device, area, None, self.loop.clock, session)
        return Run(device, session, store, asyncio.create_task(session.run(store)))

    async def open_owned(self, name: str = "host") -> Run:
        run = await self.open(name)
        await run.owned()
        return run

    async def superblock(self) -> Any:
        found = await ownership.read_superblocks(
            CardBlocks(self.device(), self.loop.clock), self.medium.size_bytes
        )
        return found.superblock  # type: ignore[union-attr]
