"""Connections that break while the process lives on: an owner that comes back late, and writes that land late."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.crash.bench import AU_BYTES, FAULTS, KEEP_ALIVE_MS, SCOPE, SIZE_BYTES, Base, CrashBench
from tests.crash.explore import land, sound, use
from tests.crash.scenarios import SCENARIOS
from xkv_gateway.card import ownership
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.ownership import SETTLE_MARGIN_NS
from xkv_gateway.card.store import CardOffline
from xkv_gateway.card.superblock import Chosen
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from tests.crash.bench import Life

STEP_NS: Final = 60_000
STEPS: Final = 100
SLOW_NS: Final = 2_000_000
LATE_NS: Final = 6_000_000_000
"""The other one has the card by then, and has stored something."""
LATE_STEPS: Final = 40
WIPE_STEP_NS: Final = 150_000


async def _stores(life: Life) -> None:
    """Store one key after the other, whatever becomes of the card."""
    for number in range(30):
        while not life.task.done():
            try:
                await life.save(b"back %d" % number, size_bytes=100)
            except CardOffline:
                await life.session._blocks.online()
                await asyncio.sleep(0.000_05)
            else:
                break


def comes_back(base: Base, after_ns: int, break_at_ns: int = 0, *, arrives: bool = True) -> bool:
    """Play one moment; tell whether the second gateway got the card. `arrives`: what is on its way then is executed, or never."""
    took = False

    async def work(bench: CrashBench) -> None:
        nonlocal took
        first = await bench.open_owned("first")
        await asyncio.sleep(0.1)
        storing = asyncio.create_task(_stores(first))
        await asyncio.sleep(break_at_ns / 1e9)
        # Slower than the other one, so that there is more between its look at the superblock and its acknowledgement.
        first.device.faults = replace(FAULTS, latency_ns_max=SLOW_NS)
        began_ns = bench.loop.clock()
        first.device.break_connection(KEEP_ALIVE_MS * 1_000_000 + SETTLE_MARGIN_NS + after_ns)
        for number in list(bench.medium.in_flight):
            (bench.medium.execute if arrives else bench.medium.forget)(number)
        second = None
        with contextlib.suppress(CardUnavailableError, CardLost, CardOffline):
            second = await bench.open("second")
            await second.owned()
            took = True
            await second.save(b"of the second")
        await asyncio.sleep((began_ns + 16_000_000_000 - bench.loop.clock()) / 1e9)
        if second is not None:
            await second.kill()
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        await first.kill()
        last = await bench.open("last", exclusive=True)
        sound(last)
        await bench.told.judge(last)
        await last.kill()

    # Other latencies each time.
    assert replace(base, lives=base.lives + 1000 + after_ns // 1000 + break_at_ns).bench().run(work)
    return took


def _base() -> Base:
    return next(scenario for scenario in SCENARIOS if scenario.name == "store").base()


def any_owner_that_comes_back() -> None:
    """Sweep the moment over the opening of the second gateway."""
    took = [comes_back(_base(), step * STEP_NS - SLOW_NS * 2) for step in range(STEPS)]
    assert True in took
    assert False in took


def any_owner_that_comes_back_late() -> None:
    """It was cut off in the middle of a store, at any moment of it."""
    for step in range(LATE_STEPS):
        assert comes_back(_base(), LATE_NS, step * STEP_NS // 2, arrives=step % 2 == 0)


def any_eraser_that_comes_back_late() -> None:
    """It was cut off in the middle of a wipe; the next owner has gone on with that, and filled the card."""

    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")
        await first.save(b"wiped", size_bytes=100 * AU_BYTES)
        wiping = asyncio.create_task(first.wipe(SCOPE))
        await asyncio.sleep(step * WIPE_STEP_NS / 1e9)
        first.device.break_connection(KEEP_ALIVE_MS * 1_000_000 + SETTLE_MARGIN_NS + LATE_NS)
        for number in list(bench.medium.in_flight):
            bench.medium.execute(number)
        second = await bench.open("second")
        await second.owned()
        await use(second)
        await asyncio.sleep(10)
        await asyncio.gather(first.task, return_exceptions=True)
        wiping.cancel()
        await asyncio.gather(wiping, return_exceptions=True)
        await bench.told.judge(second)
        await second.kill()
        await first.kill()

    for step in range(LATE_STEPS):
        assert replace(_base(), lives=2000 + step).bench().run(work)


def loser_acknowledges_nothing() -> None:
    """From the moment on at which a taker's superblocks are there, but for what was looked up just before."""
    late: list[int] = []
    taken_at_ns: list[int] = []

    async def work(bench: CrashBench) -> None:
        first = await bench.open_owned("first")

        async def stores() -> None:
            number = 0
            while not first.task.done():
                number += 1
                with contextlib.suppress(CardOffline):
                    if await first.save(b"first %d" % (number % 8), size_bytes=100) == ["stored"]:
                        late.append(bench.loop.clock())
                    await first.delete(b"first %d" % (number % 8))
                await asyncio.sleep(0.000_05)

        storing = asyncio.create_task(stores())
        await asyncio.sleep(0.05)
        taking = asyncio.create_task(bench.open("second", takeover=True))
        while not taken_at_ns:
            found = await ownership.read_superblocks(CardBlocks(bench.device(), bench.loop.clock), SIZE_BYTES)
            if isinstance(found, Chosen) and found.superblock.owner == "second":
                taken_at_ns.append(bench.loop.clock())
        second = await taking
        await second.owned()
        await asyncio.gather(storing, first.task, return_exceptions=True)
        await second.kill()

    assert _base().bench().run(work)
    assert len(late) > 10
    # What it looked at before the second copy was written, and what its journal group then took.
    assert late[-1] - taken_at_ns[0] < ACKNOWLEDGED_NS, "the loser goes on"


ACKNOWLEDGED_NS: Final = 5 * FAULTS.latency_ns_max

LOST_STEP_NS: Final = 15_000
LOST_STEPS: Final = 40


def lost_write_before_a_clean_stop(base: Base, after_ns: int) -> int:
    """A write gets lost on its way, its run ends in order, the next one begins at once, and then that write is executed.

    Returns:
        How many writes got lost.
    """
    lost = 0

    async def work(bench: CrashBench) -> None:
        nonlocal lost
        first = await bench.open_owned(exclusive=False)
        saving = asyncio.create_task(first.save(b"lost", b"too", size_bytes=9000))
        await asyncio.sleep(after_ns / 1e9)
        first.device.break_connection(1_000_000)
        lost = len(bench.medium.in_flight)
        for number in bench.medium.in_flight:
            # At the last moment before the association certainly ends.
            bench.loop.call_later(KEEP_ALIVE_MS / 1000 - 0.001, land, bench, number, 0.0, 1.0)
        await saving
        assert await first.stop()
        second = await bench.open_owned(exclusive=False)
        sound(second)
        await use(second)
        await asyncio.sleep(KEEP_ALIVE_MS / 1000 + 1)
        await bench.told.judge(second)
        await second.kill()
        last = await bench.open_owned()
        sound(last)
        await bench.told.judge(last)
        await last.kill()

    assert base.bench().run(work)
    return lost


def any_lost_write_before_a_clean_stop() -> None:
    """Sweep the moment over a store."""
    lost = [lost_write_before_a_clean_stop(_base(), step * LOST_STEP_NS) for step in range(LOST_STEPS)]
    assert sum(lost) > 2
