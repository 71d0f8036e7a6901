"""Seeds on a real card session: superblocks, journal ring, checkpoints and recovery are the product's own.

A probe recovers a drawn survivor of the medium with the product's own code, in a loop of its own, at any moment of the run; a
restart is a power failure, the death of the process (its late writes land while the next run is there) or an orderly end,
and the next run must come back warm: with all that was acknowledged, and nothing that was removed.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.sim import recovery
from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.gateway import Gateway, Parts, Settings, SimRegions, _hello, direct_service
from tests.sim.loop import SimLoop
from tests.sim.medium import Image, Medium
from tests.sim.replay import Entry, RecordFault, Replay
from tests.sim.world import Report, World
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.layout import plan
from xkv_gateway.card.opening import FormatWish, OpenOptions, open_card
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.store import CardStore
from xkv_gateway.core.lifecycle import State
from xkv_gateway.core.records import FreedBatch
from xkv_gateway.errors import CardUnavailableError
from xkv_rpc import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_gateway.card.journal import Journal
    from xkv_gateway.card.layout import Layout
    from xkv_gateway.card.session import CardSession
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import EngineLimits, Lsn

ROOM_BYTES: Final = 8 << 20
QUIET_S: Final = 120.0
STOP_S: Final = 30.0


def replay_of(engine: Engine) -> Replay:
    """What an engine that was just restored holds, as if its records had been replayed."""
    state, replay = engine._state, Replay()
    table, names = state.slots, state.names
    pending = state.log._pending
    replay.lsn = pending[0].lsn - 1 if pending else state.log.last_lsn
    for slot in (table.state != State.ABSENT).nonzero()[0].tolist():
        home = names.home(int(table.home[slot]))
        where = table.state[slot : slot + 1].nonzero()[0].astype("uint32") + slot
        entry = Entry(
            slot,
            int(table.generation[slot]),
            (int(table.digest_low[slot]), int(table.digest_high[slot])),
            home.namespace.name,
            home.scope.name,
            int(table.size_bytes[slot]),
            int(table.checksum[slot]),
            tuple((extent.start_au, extent.count_au) for extent in state.extents_of(where)[0]),
            doomed=table.state[slot] != State.LIVE,
        )
        replay.hold(entry)
    for record in pending:
        if isinstance(record, FreedBatch):
            for slot, generation in zip(record.slots.tolist(), record.generations.tolist(), strict=True):
                replay.hold(Entry(slot, generation, (0, 0), "", b"", 0, 0, (), doomed=True))
    replay.name(
        {space.ident: space.name for space in names.namespaces.values()},
        {scope.ident: scope.name for scope in names.scopes.values()},
    )
    return replay


class JournalTap:
    """Between the store and the journal of the card: follows what is submitted and what is durable."""

    def __init__(self, journal: Journal, engine: Engine, blame: Callable[[str], None]) -> None:
        self.durable, self.latest = replay_of(engine), replay_of(engine)
        self._journal = journal
        self._blame = blame
        self._batches: list[tuple[Lsn, Sequence[Record]]] = []

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:
        """See `Journal.submit`."""
        try:
            self.latest.apply(records)
        except RecordFault as fault:
            self._blame(f"the records: {fault}")
        self._batches.append((last_lsn, records))
        self._journal.submit(records, last_lsn, partial(self._done, durable))

    def cover(self, done: Callable[[], None]) -> None:
        """See `Journal.cover`."""
        self._journal.cover(done)

    def _done(self, durable: Callable[[Lsn], None], lsn: Lsn) -> None:
        while self._batches and self._batches[0][0] <= lsn:
            with suppress(RecordFault):
                self.durable.apply(self._batches.pop(0)[1])
        durable(lsn)


class CardGateway(Gateway):
    """A gateway on a card session."""

    def __init__(
        self,
        loop: SimLoop,
        rng: random.Random,
        settings: Settings,
        session: CardSession,
        store: CardStore,
        blame: Callable[[str], None],
    ) -> None:
        self.blame = blame
        self.gone = False
        self.lost: CardLost | None = None
        """Why it gave the card up before it had it."""
        self.regions = SimRegions()
        self.clock = loop.clock
        self.session = session
        self._loop, self._rng, self._requests, self._open = loop, rng, 0, {}
        assert isinstance(store.device, SimDevice)
        self.device = store.device
        self.area = store.transfer._area
        self.limits = settings.limits
        self.store = store
        self._start_journal = store.start_journal
        store.start_journal = self._tap  # type: ignore[method-assign] # to listen to the journal
        self.service = Parts().service(
            store,
            _hello,
            self.regions,
            m.Limits(object_bytes=self.limits.object_bytes_max),
            store_wait_ns=settings.store_wait_ns,
            inline_loads_bytes_max=settings.inline_loads_bytes_max,
            direct=direct_service(store, self.area, settings),
        )
        self.task = asyncio.create_task(self._run(), name="session")

    def _tap(self, journal: Journal) -> None:
        self.engine = self.store.engine
        tap = JournalTap(journal, self.engine, self.blame)
        self.journal = tap  # type: ignore[assignment] # has what the oracle asks of a journal
        self._start_journal(tap)

    async def _run(self) -> None:
        try:
            await self.session.run(self.store)
        except Exception as error:  # noqa: BLE001 - whatever ends a session is a finding here
            if isinstance(error, CardLost) and not self.session._owned.is_set():
                self.lost = error
            elif not self.gone:
                self.blame(f"the session ended: {type(error).__name__}: {error}")

    @property
    def online(self) -> bool:
        """Also whether the card is certainly ours."""
        return self.store.online

    async def kill(self) -> None:
        self.gone = True
        self.store.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self._drop_requests()


class WarmWorld(World):
    """The run of one seed on a real card session.

    Args:
        seed: of everything.
        steps: operations.
        reopens_at_once: whether the next run begins right after an orderly end, while writes of unknown outcome may
            still land, or only when they have settled.
    """

    def __init__(self, seed: int, steps: int, *, reopens_at_once: bool = False) -> None:
        super().__init__(seed, steps)
        self.reopens_at_once = reopens_at_once
        self._quiet_s = QUIET_S
        swarm = self.swarm
        limits = swarm.settings.limits
        room = plan(ROOM_BYTES, swarm.block_bytes, limits.au_bytes, limits.max_objects)
        size_bytes = ROOM_BYTES + (swarm.units - room.capacity_au) * limits.au_bytes
        layout = plan(size_bytes, swarm.block_bytes, limits.au_bytes, limits.max_objects)
        self._medium = Medium(size_bytes, swarm.block_bytes)
        # Damage to the card's own structures has tests of its own.
        self._faults = replace(
            swarm.settings.faults,
            fail_probability=0.0,
            transient_flip_probability=0.0,
            persistent_flip_probability=0.0,
            misdirect_probability=0.0,
            digest_probability=0.0,
        )
        self._limits = self._limits_of(layout)
        self._settings = replace(swarm.settings, limits=self._limits, faults=self._faults)

    def _limits_of(self, layout: Layout) -> EngineLimits:
        return replace(
            self.swarm.settings.limits, capacity_au=layout.capacity_au, max_objects=layout.max_objects
        )

    def _options(self, loop: SimLoop, entropy: Callable[[int], bytes], *, exclusive: bool) -> OpenOptions:
        keep_alive_ms = self._faults.settle_ns // 1_000_000
        wish = FormatWish(self._limits.au_bytes, self.swarm.settings.limits.max_objects)
        return OpenOptions(
            owner=Owner(
                "sim",
                "nqn.2026-01.test:sim",
                bytes(16),
                bytes(16),
                1,
                keep_alive_ms,
                self._limits.lease_ttl_max_ns + self._limits.direct_grace_ns,
                hands_out_extents="direct" in self.swarm.weights,
            ),
            limits_of=self._limits_of,
            clock=loop.clock,
            wall_clock=loop.clock,
            entropy=entropy,
            exclusive=exclusive,
            format_blank=wish,
        )

    async def _start_gateway(self) -> None:
        landed = self._landed_late()
        try:
            device, gateway = await self._begun()
        except (CardUnavailableError, CardLost):
            if self._landed_late() == landed:
                raise
            # A beat of the dead process landed late, so that it seemed to live. Once nothing can land any more, it must open.
            await asyncio.sleep(self._faults.settle_ns / 1e9)
            device, gateway = await self._begun()
        self._raise_breaches()
        if hasattr(self, "gateway"):
            # What the new run knows, judged by what the old one had promised.
            recovery.judge(self.gateway, self.oracle, self._medium.current(), gateway.journal.latest)
        self.oracle.restarted_warm()
        self.oracle.digest_of = lambda i: _digest(gateway.engine, i.namespace, i.scope, i.key)
        self.gateway = self.oracle.gateway = gateway
        self._raise_breaches()
        device.faults = self._faults
        self._up.set()

    def _landed_late(self) -> int:
        """Writes of the run before that landed after its end."""
        return self.gateway.device.injected.landed_late if hasattr(self, "gateway") else 0

    async def _begun(self) -> tuple[SimDevice, CardGateway]:
        """Start a run; returns when it has the card. Raises CardUnavailableError, CardLost."""
        device = SimDevice(self._loop, self._medium, self._rng, Faults(settle_ns=self._faults.settle_ns))
        options = self._options(self._loop, self._rng.randbytes, exclusive=False)
        session = await open_card(device, CardBlocks(device, options.clock), options)
        layout = session.superblock.layout
        area = DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)
        store = CardStore(session.engine, device, area, None, self._loop.clock, session)
        gateway = CardGateway(self._loop, self._rng, self._settings, session, store, self.oracle.blame)
        owned = asyncio.create_task(session._owned.wait())
        await asyncio.wait((owned, gateway.task), return_when=asyncio.FIRST_COMPLETED)
        owned.cancel()
        if gateway.lost is not None:
            await gateway.kill()
            raise gateway.lost
        return device, gateway

    async def _restart(self, rng: random.Random) -> None:
        if self._restarting:
            return
        self._restarting = True
        self._up.clear()
        old = self.gateway
        assert isinstance(old, CardGateway)
        kind = rng.choice(("power", "death", "stop"))
        self._note(f"restart by {kind}")
        if kind == "power":
            image = self._probe(rng)
            old.device.lose_power()
            await old.kill()
            self._medium.lose_power(image)
        elif kind == "death":
            old.device.die()
            await old.kill()
        else:
            await old.service.drain(STOP_S)
            old.device.faults = Faults(settle_ns=self._faults.settle_ns)
            await old.session.stop()
            await old.kill()
            await old.device.aclose()
            if not self.reopens_at_once:
                await asyncio.sleep(self._faults.settle_ns / 1e9)
        self._collect()
        await self._start_gateway()
        self._restarting = False

    def _probe(self, rng: random.Random) -> Image:
        self._crashes += 1
        image = self._medium.draw_survivor(rng)
        recovery.judge(self.gateway, self.oracle, image, self._recovered(image))
        return image

    def _recovered(self, image: Image) -> Replay:
        """What the product recovers from an image: in a loop of its own, while this one stands still."""
        loop, found = SimLoop(random.Random(0)), list[Replay]()
        medium = Medium(self._medium.size_bytes, self._medium.block_bytes, durable=dict(image))

        async def work() -> None:
            device = SimDevice(loop, medium, random.Random(0), Faults())
            options = self._options(loop, random.Random(0).randbytes, exclusive=True)
            found.append(
                replay_of((await open_card(device, CardBlocks(device, options.clock), options)).engine)
            )

        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            loop.run(work())
        finally:
            loop.close()
            asyncio._set_running_loop(outer)
        return found[0]


def _digest(engine: Engine, namespace: str, scope: bytes, key: bytes) -> tuple[int, int]:
    low, high = engine._state.digester.digest(namespace, scope, [key])
    return int(low[0]), int(high[0])


def play_warm(seed: int, steps: int, *, reopens_at_once: bool = False) -> Report:
    """Play one seed on a real card session. Raises Violation."""
    return WarmWorld(seed, steps, reopens_at_once=reopens_at_once).run()
