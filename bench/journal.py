"""Stores with the journal beside stores without one: what durability of the index costs.

Stores of 1 MiB, 8 and 32 in flight, on each of two namespaces of one target, in turns and in one process. One side is a card
with its journal (for each group of records a batch, then a flush and a look at the superblock together); the other side keeps no
journal, and only flushes the payloads of each group where the journal would have. For both policies: what survives a
loss of power, and what survives the end of the process, which needs no flush at all.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Final

import uvloop

from bench.blank_card import format_blank_card
from bench.harness import (
    MIB,
    BenchError,
    CpuClock,
    alternate,
    at_least,
    core_split,
    medians,
    on_cores,
    work_folder,
)
from bench.softcard import running_softcard
from bench.spdk_target import CARD_NSID, NQN, RAW_NSID, TARGET_ENV, spdk_target
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.layout import plan
from xkv_gateway.card.opening import OpenOptions, open_card
from xkv_gateway.card.ownership import Owner
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.save import Save
from xkv_gateway.card.store import CardStore
from xkv_gateway.config import Config
from xkv_gateway.core.engine import Engine
from xkv_gateway.core.types import BeginStore, Delete, StoreStatus
from xkv_gateway.daemon.card import engine_limits
from xkv_nvmeof.blockdev import DeviceError
from xkv_nvmeof.initiator import TcpInitiator
from xkv_nvmeof.initiator_options import InitiatorOptions, TargetAddress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_gateway.card.layout import Layout
    from xkv_gateway.core.records import Record
    from xkv_gateway.core.types import EngineLimits, Lsn
    from xkv_nvmeof.blockdev import BlockDevice

DEPTHS: Final = (8, 32)
"""Stores in flight. One journal batch serves all that wait, so its cost falls with the depth."""
OBJECTS: Final = 224
ROUNDS: Final = 11
WARM_ROUNDS: Final = 4
"""Until all units have been written to once: the first write to a page of a target's memory is several times slower."""
RATIO_MIN: Final = 0.9
AU_BYTES: Final = 64 * 1024
SOFT_BYTES: Final = 512 * MIB
STORE_WAIT_NS: Final = 20_000_000_000
HOST_ID: Final = bytes(range(3, 19))
HOST_NQN: Final = "nqn.2026-01.org.example:bench-journal"


class NoJournal:
    """Makes payloads durable as the journal does, group after group, and keeps no record."""

    def __init__(self, device: BlockDevice, *, flush: bool) -> None:
        self._device = device
        self._flush = flush
        self._waiting: list[Callable[[], None]] = []
        self._task: asyncio.Task[None] | None = None

    def submit(self, records: Sequence[Record], last_lsn: Lsn, durable: Callable[[Lsn], None]) -> None:  # noqa: ARG002
        """See `Journal.submit`."""
        asyncio.get_running_loop().call_soon(durable, last_lsn)

    def cover(self, done: Callable[[], None]) -> None:
        """See `Journal.cover`."""
        self._waiting.append(done)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            if self._flush:
                try:
                    await self._device.flush()
                except DeviceError:
                    return  # the run is over, or who waits for this will say what is wrong
            for done in waiting:
                done()


class StoresUnderTest:
    """Stores objects into a card store and forgets them again."""

    def __init__(self, runner: asyncio.Runner, store: CardStore, depth: int) -> None:
        self._runner = runner
        self._store = store
        self._payloads = [memoryview(bytearray(os.urandom(MIB))) for _ in range(depth)]
        self._keys = [hashlib.blake2b(b"%d" % n, digest_size=32).digest() for n in range(OBJECTS)]

    def store_mib_s(self) -> float:
        """Throughput of storing all objects; forgetting them is not timed."""
        return self._runner.run(self._measure())

    async def _measure(self) -> float:
        store, keys = self._store, iter(self._keys)
        begin = time.perf_counter()

        async def walk(payload: memoryview) -> None:
            for key in keys:
                request = BeginStore("bench", b"", [key], [MIB])
                statuses = await Save(store, request, [payload], store.clock() + STORE_WAIT_NS).run()
                if statuses != [StoreStatus.STORED]:
                    raise BenchError(f"a store of 1 MiB was answered {statuses[0].value}")

        async with asyncio.TaskGroup() as group:
            for payload in self._payloads:
                group.create_task(walk(payload))
        elapsed = time.perf_counter() - begin
        forgotten = store.delete(Delete("bench", b"", self._keys))
        await store.durable(forgotten.lsn, store.clock() + STORE_WAIT_NS)
        return OBJECTS / elapsed


class Cards:
    """A card with its journal, and a namespace without."""

    def __init__(self, stack: ExitStack, card: TargetAddress, raw: TargetAddress, depth: int) -> None:
        self._stack = stack
        self._card = card
        self._raw = raw
        self._depth = depth
        self.runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))

    def with_journal(self, *, flush: bool) -> StoresUnderTest:
        """Take the card."""
        return StoresUnderTest(self.runner, self.runner.run(self._open(flush=flush)), self._depth)

    def without(self, *, flush: bool) -> StoresUnderTest:
        """Use the other namespace from its first byte on."""
        return StoresUnderTest(self.runner, self.runner.run(self._open_raw(flush=flush)), self._depth)

    async def _device(self, address: TargetAddress) -> TcpInitiator:
        options = InitiatorOptions(host_nqn=HOST_NQN, host_id=HOST_ID)
        device = await TcpInitiator.connect(address, options, clock=time.monotonic_ns, entropy=os.urandom)
        self._stack.callback(self.runner.run, device.aclose())
        return device

    async def _open(self, *, flush: bool) -> CardStore:
        device = await self._device(self._card)
        options = OpenOptions(
            owner=Owner("bench", HOST_NQN, HOST_ID, bytes(16), os.getpid(), 10_000, 0),
            limits_of=_limits_of,
            clock=time.monotonic_ns,
            wall_clock=time.time_ns,
            entropy=os.urandom,
            flush=flush,
            exclusive=True,
        )
        session = await open_card(device, CardBlocks(device, time.monotonic_ns), options)
        area = _area_of(session.superblock.layout)
        store = CardStore(session.engine, device, area, None, time.monotonic_ns, session)
        run = asyncio.create_task(session.run(store))
        if (reservation := session.reservation) is not None:
            # So that the card can be formatted anew for the next measurement.
            self._stack.callback(lambda: self.runner.run(reservation.give_up()))
        self._stack.callback(run.cancel)
        while not store.writable:
            if run.done():
                await run
            await asyncio.sleep(0.01)
        return store

    async def _open_raw(self, *, flush: bool) -> CardStore:
        device = await self._device(self._raw)
        geometry = device.geometry
        layout = plan(geometry.size_bytes, geometry.block_bytes, AU_BYTES)
        engine = Engine(_limits_of(layout), digest_secret=bytes(32), entropy=os.urandom)
        journal = NoJournal(device, flush=flush)
        return CardStore(engine, device, _area_of(layout), journal, time.monotonic_ns)


def _limits_of(layout: Layout) -> EngineLimits:
    return engine_limits(Config(), layout)


def _area_of(layout: Layout) -> DataArea:
    return DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run it and return the results."""
    parser = argparse.ArgumentParser(prog="bench.journal", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args(list(argv)).rounds
    on_spdk = bool(os.environ.get(TARGET_ENV))
    results: dict[str, Any] = {"target": "SPDK" if on_spdk else "soft cards", "bars": []}
    with on_cores(core_split()[1]), ExitStack() as stack:
        folder = stack.enter_context(work_folder())
        if on_spdk:
            target = stack.enter_context(spdk_target(folder))
            ends = [TargetAddress("127.0.0.1", target.port, NQN, nsid) for nsid in (CARD_NSID, RAW_NSID)]
        else:
            soft = [
                stack.enter_context(running_softcard(folder, name, SOFT_BYTES)) for name in ("card", "raw")
            ]
            ends = [TargetAddress(card.host, card.port, card.nqn, card.nsid) for card in soft]
        for depth, durability in product(DEPTHS, ("power", "process")):
            compared = _compare(ends[0], ends[1], rounds, depth, flush=durability == "power")
            results[f"depth {depth}, {durability}"] = compared
            middle = compared["mib_s"]
            name = f"1 MiB store at depth {depth}, durability {durability}: journal / none"
            results["bars"].append(at_least(name, middle["journal"] / middle["none"], RATIO_MIN))
    return results


def _compare(
    card: TargetAddress, raw: TargetAddress, rounds: int, depth: int, *, flush: bool
) -> dict[str, Any]:
    format_blank_card(card)
    with ExitStack() as stack:
        cards = Cards(stack, card, raw, depth)
        sides = {"journal": cards.with_journal(flush=flush), "none": cards.without(flush=flush)}
        clock = CpuClock(os.getpid())
        cpu_ms_gib: dict[str, list[float]] = {name: [] for name in sides}

        def costed(name: str) -> float:
            begin_s = clock.seconds()
            mib_s = sides[name].store_mib_s()
            cpu_ms_gib[name].append((clock.seconds() - begin_s) * 1e3 * 1024 / OBJECTS)
            return mib_s

        for _ in range(WARM_ROUNDS):
            for side in sides.values():
                side.store_mib_s()
        throughput = alternate(rounds, {name: partial(costed, name) for name in sides})
        return {"mib_s": medians(throughput), "cpu_ms_gib": medians(cpu_ms_gib), "rounds": throughput}


if __name__ == "__main__":
    import json
    import sys

    print(json.dumps(main(sys.argv[1:]), indent=2))
