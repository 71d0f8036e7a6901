"""Lives of a gateway on a small simulated card, each of which may be cut at any command."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from tests.crash.device import CrashDevice, Fuse
from tests.crash.told import Told, delete_request, load_request
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import Image, Medium
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.checksum import checksum_of
from xkv_gateway.card.direct import Commit, Direct, Reserve
from xkv_gateway.card.load import Load
from xkv_gateway.card.opening import FormatWish, OpenOptions, open_card
from xkv_gateway.card.operator import Operator
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.save import Save
from xkv_gateway.card.store import CardStore, JournalFull
from xkv_gateway.core.tenancy import EvictionRules
from xkv_gateway.core.types import BeginStore, EngineLimits, LoadStatus
from xkv_nvmeof.controller_reservations import ReservationTable

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from tests.crash.told import Content, Key
    from xkv_gateway.card.direct import ByteRanges
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.session import CardSession
    from xkv_gateway.core.types import TicketId

SIZE_BYTES: Final = 6 << 20
BLOCK_BYTES: Final = 512
AU_BYTES: Final = 4096
OBJECTS_MAX: Final = 40
KEEP_ALIVE_MS: Final = 4000
"""Longer than an opener watches the heartbeat: so there is a time between reading the index and being settled."""
FAULTS: Final = Faults(settle_ns=KEEP_ALIVE_MS * 1_000_000)
GRACE_NS: Final = 200_000_000
HELD_NS: Final = 300_000_000
"""How long clients of a gateway that hands out extents may use them: shorter than anything else that a next run waits for."""
STORE_WAIT_NS: Final = 30_000_000_000
NAMESPACE: Final = "ns"
SCOPE: Final = b"tenant"


def limits_of(layout: Layout) -> EngineLimits:
    return EngineLimits(
        capacity_au=layout.capacity_au,
        au_bytes=layout.au_bytes,
        max_objects=layout.max_objects,
        object_bytes_max=SIZE_BYTES,
        lease_ttl_max_ns=60_000_000_000,
        leases_per_scope_max=100,
        leased_bytes_per_scope_max=SIZE_BYTES,
        eviction=EvictionRules(trigger_watermark=2.0),
        direct_grace_ns=GRACE_NS,
    )


def content_of(name: bytes, version: int, size_bytes: int) -> bytes:
    """Bytes that nobody else has."""
    return random.Random(f"{name!r} {version}").randbytes(size_bytes)


@dataclass(frozen=True, slots=True)
class Held:
    """What a client holds under a ticket."""

    ticket: TicketId
    names: list[bytes]
    contents: list[bytes]
    ranges: list[ByteRanges]


@dataclass(eq=False)
class Life:
    """One gateway on the card. What its clients ask and hear goes to `told`."""

    bench: CrashBench
    device: CrashDevice
    session: CardSession
    store: CardStore
    task: asyncio.Task[None]
    direct: Direct

    async def owned(self) -> None:
        """Return once everything is served; raise what kept it from that."""
        owned = asyncio.create_task(self.session._owned.wait())
        await asyncio.wait((owned, self.task), return_when=asyncio.FIRST_COMPLETED)
        owned.cancel()
        if self.task.done():
            self.task.result()

    async def save(self, *names: bytes, size_bytes: int = 5000, scope: bytes = SCOPE) -> list[str]:
        """Store keys of one home, in one request."""
        told, contents = self.bench.told, [self.bench.content(name, size_bytes) for name in names]
        keys: list[Key] = [(NAMESPACE, scope, name) for name in names]
        places = [told.asks(key, content) for key, content in zip(keys, contents, strict=True)]
        request = BeginStore(NAMESPACE, scope, list(names), [len(content) for content in contents])
        views = [memoryview(content) for content in contents]
        results = await Save(self.store, request, views, self.store.clock() + STORE_WAIT_NS).run()
        for key, content, place, status in zip(keys, contents, places, results, strict=True):
            if status.value == "stored":
                told.hears(key, content, place)
        return [status.value for status in results]

    async def reserve(self, *names: bytes, size_bytes: int = 5000, ttl_s: float = 30.0) -> Held:
        """Reserve room; the client of it may write until its time and the grace are over."""
        contents = [self.bench.content(name, size_bytes) for name in names]
        request = BeginStore(NAMESPACE, SCOPE, list(names), [len(content) for content in contents])
        deadline_ns = self.store.clock() + STORE_WAIT_NS
        reserved = await Reserve(self.direct, request, round(ttl_s * 1e9), deadline_ns).reserve()
        assert reserved.ticket is not None
        assert reserved.statuses == [None] * len(names)
        ranges = [each for each in reserved.extents if each is not None]
        held = Held(reserved.ticket, list(names), contents, ranges)
        self.bench.left[reserved.ticket] = held
        return held

    async def write(self, held: Held) -> None:
        """What its client does: write all, and flush."""
        for ranges, content in zip(held.ranges, held.contents, strict=True):
            rest = content.ljust(sum(length for _, length in ranges), b"\0")
            for offset, length in ranges:
                await self.device.write_from(offset, [memoryview(rest[:length])])
                rest = rest[length:]
        await self.device.flush()

    def abort(self, held: Held, *, settled: bool) -> None:
        if settled:
            self.bench.left.pop(held.ticket)
        self.direct.abort(held.ticket, settled=settled)

    async def commit(self, held: Held, *, told: bool = True) -> list[str]:
        """Commit; with `told`, the gateway is told the checksums."""
        self.bench.left.pop(held.ticket, None)  # its client is done, whatever comes of it
        told_of = self.bench.told
        keys: list[Key] = [(NAMESPACE, SCOPE, name) for name in held.names]
        places = [told_of.asks(key, content) for key, content in zip(keys, held.contents, strict=True)]
        sums = [checksum_of(content) if told else None for content in held.contents]
        statuses = await self.direct.commit(Commit(self.direct, held.ticket, sums))
        for key, content, place, status in zip(keys, held.contents, places, statuses, strict=True):
            if status.value == "stored":
                told_of.hears(key, content, place)
        return [status.value for status in statuses]

    async def delete(self, *names: bytes, scope: bytes = SCOPE) -> None:
        told, keys = self.bench.told, [(NAMESPACE, scope, name) for name in names]
        places = [told.asks(key, None) for key in keys]
        await self._removed(lambda: self.store.delete(delete_request(NAMESPACE, scope, list(names))).lsn)
        for key, place in zip(keys, places, strict=True):
            told.hears(key, None, place)

    @property
    def operator(self) -> Operator:
        return Operator(self.session, self.store)

    async def wipe(self, scope: bytes | None = None) -> None:
        """Wipe the namespace, or a scope of it, and see it through."""
        told = self.bench.told
        keys = [key for key in told.may if scope in {None, key[1]}]
        places = [told.asks(key, None) for key in keys]
        told.wiped.update(keys)
        job = self.operator.wipe(NAMESPACE, scope)
        await job.durable()
        for key, place in zip(keys, places, strict=True):
            told.hears(key, None, place)
        await job.run()

    async def _removed(self, remove: Callable[[], Any]) -> None:
        while True:
            try:
                lsn = remove()
            except JournalFull:
                await self.store.room(self.store.clock() + 1_000_000_000)
            else:
                break
        assert await self.store.durable(lsn, self.store.clock() + STORE_WAIT_NS)

    async def load_all(
        self, namespace: str, scope: bytes, names: list[bytes]
    ) -> list[tuple[LoadStatus, Content]]:
        loaded = await Load(self.store, load_request(namespace, scope, names), None).run()
        return [(each.status, bytes(each.payload) if each.payload is not None else None) for each in loaded]

    async def fill(self) -> None:
        """Store all that is free, as one object: every unit that is not in use is written to."""
        statuses = ["io_error"]
        while statuses == ["io_error"]:
            usage = self.store.engine.usage()
            free_bytes = usage.free_au * self.session.superblock.layout.au_bytes
            if not free_bytes or usage.live_objects == OBJECTS_MAX:
                return
            statuses = await self.save(b"all that is free %d" % self.bench.version, size_bytes=free_bytes)
            if not self.bench.fuse.blown:
                break
        assert statuses == ["stored"], f"all that is free is {statuses}: {usage}"

    async def stop(self) -> bool:
        """End in order."""
        try:
            return await self.session.stop()
        finally:
            await self._end()
            await self.device.aclose()

    async def kill(self) -> None:
        """End the process on the spot; nothing of it is on its way."""
        self.device.die()
        await self._end()

    async def _end(self) -> None:
        self.store.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass(eq=False)
class CrashBench:
    """A card, a loop, and what was told."""

    image: Image = field(default_factory=dict)
    told: Told = field(default_factory=Told)
    fuse: Fuse = field(default_factory=Fuse)
    seed: int = 1
    version: int = 0
    reservations: bool = False
    """Whether the controller has reservations. They are gone with the power, like all that a bench has but its image."""
    direct: bool = False
    """Whether its gateways hand out extents."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.left: dict[TicketId, Held] = {}
        """What clients may still write to."""
        self.loop = SimLoop(random.Random(self.seed))
        table = ReservationTable() if self.reservations else None
        self.medium = Medium(SIZE_BYTES, BLOCK_BYTES, durable=dict(self.image), reservations=table)

    def run(self, work: Callable[[CrashBench], Coroutine[Any, Any, None]]) -> bool:
        """Run to the end, or until the fuse blows. Tells whether it ran to the end."""

        async def watched() -> None:
            blown: asyncio.Future[None] = self.loop.create_future()
            self.fuse.on_blow = lambda: None if blown.done() else blown.set_result(None)
            task = asyncio.ensure_future(work(self))
            await asyncio.wait((task, blown), return_when=asyncio.FIRST_COMPLETED)
            if blown.done():
                # Nobody hears anything from here on.
                self.told = self.told.copy()
                task.cancel()
                await asyncio.wait((task,))
            else:
                task.result()

        try:
            self.loop.run(watched())
        finally:
            self.loop.close()
        return not self.fuse.blown

    def content(self, name: bytes, size_bytes: int) -> bytes:
        self.version += 1
        return content_of(name, self.version, size_bytes)

    def device(self, name: str = "host") -> CrashDevice:
        rng, host_id = random.Random(self.rng.random()), name.encode().ljust(16, b".")[:16]
        return CrashDevice.on(self.fuse, self.loop, self.medium, rng, FAULTS, host_id=host_id)

    def options(self, name: str, *, takeover: bool = False, exclusive: bool = False) -> OpenOptions:
        # Superblocks of two runs differ in both sectors that hold something.
        pid = self.rng.randrange(1, 1 << 22)
        return OpenOptions(
            owner=Owner(
                name,
                f"nqn.2026-01.test:{name}",
                bytes(16),
                bytes(16),
                pid,
                KEEP_ALIVE_MS,
                HELD_NS,
                self.direct,
            ),
            limits_of=limits_of,
            clock=self.loop.clock,
            wall_clock=lambda: pid,
            entropy=self.rng.randbytes,
            takeover=takeover,
            exclusive=exclusive,
            format_blank=FormatWish(AU_BYTES, OBJECTS_MAX),
        )

    async def open(self, name: str = "host", *, takeover: bool = False, exclusive: bool = False) -> Life:
        """Open the card. `exclusive`: nothing of the run before can land any more."""
        device = self.device(name)
        options = self.options(name, takeover=takeover, exclusive=exclusive)
        session = await open_card(device, CardBlocks(device, self.loop.clock), options)
        layout = session.superblock.layout
        area = DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)
        store = CardStore(session.engine, device, area, None, self.loop.clock, session)
        direct = Direct(store, area)
        return Life(self, device, session, store, asyncio.create_task(session.run(store)), direct)

    async def open_owned(self, name: str = "host", *, takeover: bool = False, exclusive: bool = True) -> Life:
        life = await self.open(name, takeover=takeover, exclusive=exclusive)
        await life.owned()
        return life


@dataclass(frozen=True, slots=True)
class Base:
    """A card at rest, and what was told."""

    image: Image
    told: Told
    version: int
    lives: int = 0
    """How many there were: randomness is never repeated, so that no two runs have one id."""
    reservations: bool = False
    direct: bool = False

    def bench(self, fuse: Fuse | None = None) -> CrashBench:
        return CrashBench(
            self.image,
            self.told.copy(),
            fuse or Fuse(),
            self.lives,
            self.version,
            reservations=self.reservations,
            direct=self.direct,
        )

    def then(self, bench: CrashBench, image: Image | None = None) -> Base:
        """What a bench that began with this one has left."""
        left = bench.medium.current() if image is None else image
        return Base(left, bench.told, bench.version, self.lives + 1, self.reservations, self.direct)


BLANK: Final = Base({}, Told(), 0)


def prepared(work: Callable[[CrashBench], Coroutine[Any, Any, None]], base: Base = BLANK) -> Base:
    """Carry something out without a crash; what is on the card then."""
    bench = base.bench()
    assert bench.run(work)
    return base.then(bench)
