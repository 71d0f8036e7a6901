"""Connections that break while the process lives on: an owner that comes back late, and writes that land late."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tests.crash.bench import FAULTS, KEEP_ALIVE_MS, Base, CrashBench
from tests.crash.explore import land, sound, use
from tests.crash.scenarios import SCENARIOS
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.ownership import SETTLE_MARGIN_NS
from xkv_gateway.card.store import CardOffline
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from tests.crash.bench import Life

STEP_NS: Final = 60_000
STEPS: Final = 100
SLOW_NS: Final = 2_000_000
"""Together longer than what an opener does between its last look and its run start."""


async def _stores(life: Life) -> None:
    """Store one key after the other, whatever becomes of the card."""
    for number in range(8):
        while not life.task.done():
            try:
                await life.save(b"back %d" % number, size_bytes=100)
            except CardOffline:
                await life.session._blocks.online()
                await asyncio.sleep(0.000_05)
            else:
                break


def comes_back(base: Base, after_ns: int) -> bool:
    """Play one moment; tell whether the second gateway got the card."""
    took = False

    async def work(bench: CrashBench) -> None:
        nonlocal took
        first = await bench.open_owned("first")
        await asyncio.sleep(0.1)
        began_ns = bench.loop.clock()
        # Slower than the other one, so that there is more between its look at the superblock and its acknowledgement.
        first.device.faults = replace(FAULTS, latency_ns_max=SLOW_NS)
        first.device.break_connection(KEEP_ALIVE_MS * 1_000_000 + SETTLE_MARGIN_NS + after_ns)
        storing = asyncio.create_task(_stores(first))
        second = None
        with contextlib.suppress(CardUnavailableError, CardLost, CardOffline):
            second = await bench.open("second")
            await second.owned()
            took = True
            await second.save(b"of the second")
        await asyncio.sleep((began_ns + 12_000_000_000 - bench.loop.clock()) / 1e9)
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        if second is not None:
            await second.kill()
        await first.kill()
        last = await bench.open("last", exclusive=True)
        sound(last)
        await bench.told.judge(last)
        await last.kill()

    assert base.bench().run(work)
    return took


def any_owner_that_comes_back() -> None:
    """Sweep the moment over the opening of the second gateway."""
    base = next(scenario for scenario in SCENARIOS if scenario.name == "store").base()
    took = [comes_back(base, step * STEP_NS - SLOW_NS * 2) for step in range(STEPS)]
    assert True in took
    assert False in took


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
    base = next(scenario for scenario in SCENARIOS if scenario.name == "store").base()
    lost = [lost_write_before_a_clean_stop(base, step * LOST_STEP_NS) for step in range(LOST_STEPS)]
    assert sum(lost) > LOST_STEPS // 4
