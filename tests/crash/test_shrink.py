"""The namespace becomes smaller while its card is served: what is beyond its end is gone, the rest is not, and the card goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.crash.bench import GRACE_NS, NAMESPACE, OBJECTS_MAX, SCOPE, SIZE_BYTES, limits_of
from tests.crash.scenarios import SCENARIOS
from xkv_gateway.card.blocks import CardBlocks
from xkv_gateway.card.check import Checker
from xkv_gateway.card.fence import CardLost
from xkv_gateway.card.session import Phase
from xkv_gateway.core.types import LoadStatus
from xkv_gateway.errors import CardUnavailableError

if TYPE_CHECKING:
    from tests.crash.bench import Base, CrashBench, Life

SMALLER_BYTES = SIZE_BYTES - (1 << 19)
OBJECT_BYTES = 30_000
NAMES = [b"object %d" % number for number in range(OBJECTS_MAX - 10)]
"""Together nearly all that there is room for."""


def base() -> Base:
    return next(each for each in SCENARIOS if each.name == "store").base()


async def filled(bench: CrashBench) -> tuple[Life, set[bytes]]:
    """A card with objects all over it; which of them lie within the size that it is about to have."""
    life = await bench.open_owned()
    for name in NAMES:
        if await life.save(name, size_bytes=OBJECT_BYTES) != ["stored"]:
            break
    layout = life.session.superblock.layout
    engine = life.store.engine
    slots = engine._state.slots
    end = (SMALLER_BYTES - (1 << 20) - layout.data.offset_bytes) // layout.au_bytes
    inside = set()
    for key, (status, _) in zip(NAMES, await life.load_all(NAMESPACE, SCOPE, NAMES), strict=True):
        if status is LoadStatus.OK:
            low, high = engine._state.digester.digest(NAMESPACE, SCOPE, [key])
            found, _held = engine._state.index.find(low, high)
            if int(slots.start_au[found[0]]) + int(slots.count_au[found[0]]) <= end:
                inside.add(key)
    assert 0 < len(inside) < len(NAMES)
    return life, inside


async def owned_again(life: Life, epoch: int) -> None:
    async with asyncio.timeout(60):
        while life.session.phase is not Phase.OWNED or life.session.superblock.stamp.epoch == epoch:
            assert not life.task.done(), life.task
            await asyncio.sleep(0.05)


async def expect(life: Life, inside: set[bytes]) -> None:
    loaded = await life.load_all(NAMESPACE, SCOPE, NAMES)
    there = {name for name, (status, _) in zip(NAMES, loaded, strict=True) if status is LoadStatus.OK}
    assert {status for status, _ in loaded} <= {LoadStatus.OK, LoadStatus.MISS}
    assert there == inside
    life.store.engine.audit()


def forget(bench: CrashBench, inside: set[bytes]) -> None:
    for name in NAMES:
        if name not in inside:
            key = (NAMESPACE, SCOPE, name)
            if key in bench.told.may:
                bench.told.hears(key, None)


def test_what_is_beyond_the_end_is_gone_and_the_rest_is_served_on_a_smaller_card() -> None:
    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        before = life.store.engine.usage()
        epoch = life.session.superblock.stamp.epoch
        life.device.resize(SMALLER_BYTES)
        await owned_again(life, epoch)
        await expect(life, inside)
        usage = life.store.engine.usage()
        assert usage.live_au < before.live_au
        layout = life.session.superblock.layout
        assert layout.size_bytes == SMALLER_BYTES
        assert (
            sum((usage.free_au, usage.reserved_au, usage.live_au, usage.doomed_au, usage.quarantined_au))
            == layout.capacity_au
        )
        # Every unit that is left can be used, and none that is not.
        forget(bench, inside)
        await life.fill()
        await bench.told.judge(life)
        assert await life.stop()
        device = bench.device()
        checker = Checker(
            device, CardBlocks(device, bench.loop.clock), limits_of, bench.loop.clock, lambda *_: None
        )
        await checker.run(payload=True)
        assert checker.report.clean, checker.report.findings
        again = await bench.open_owned()
        await bench.told.judge(again)
        await again.kill()

    assert base().bench().run(work)


def test_a_gateway_that_is_killed_meanwhile_loses_nothing_else() -> None:
    refused: list[int] = []

    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        life.device.resize(SMALLER_BYTES)
        await asyncio.sleep(delays_s[-1])
        await life.kill()
        await asyncio.sleep(10)
        try:
            again = await bench.open_owned()
        except CardUnavailableError:
            # The superblocks have yet the size of before: that is for the operator to agree to.
            refused.append(delays_s[-1])
            return
        await expect(again, inside)
        await again.kill()

    delays_s: list[float] = []
    for step in range(10):
        # Up to what a write that was cut short takes to settle.
        delays_s.append(step * step * 0.06)
        assert base().bench().run(work)
    assert 0 < len(refused) < len(delays_s)


def test_stores_and_loads_while_it_shrinks_are_answered_and_what_is_acknowledged_is_there() -> None:
    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        epoch = life.session.superblock.stamp.epoch
        deleted = sorted(inside)[:3]
        await life.delete(*deleted)
        storing = [asyncio.create_task(life.save(b"new %d" % number, size_bytes=9000)) for number in range(4)]
        await asyncio.sleep(0.000_3)
        life.device.resize(SMALLER_BYTES)
        for task in storing:
            (status,) = await task
            assert status in {"stored", "io_error", "no_space"}
        await owned_again(life, epoch)
        await expect(life, inside - set(deleted))
        await life.kill()

    assert base().bench().run(work)


def test_who_may_still_write_beyond_the_end_is_waited_for() -> None:
    """What the index forgets of such an object would be free, and the second superblock comes to where some of it was."""

    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        free_bytes = life.store.engine.usage().free_au * life.session.superblock.layout.au_bytes
        await life.delete(*(name for name in NAMES if name not in inside))
        held = await life.reserve(b"held", size_bytes=free_bytes + 2 * OBJECT_BYTES, ttl_s=5)
        epoch, began_ns = life.session.superblock.stamp.epoch, bench.loop.clock()
        end_bytes = SMALLER_BYTES - (1 << 20)
        assert any(offset + length > end_bytes for ranges in held.ranges for offset, length in ranges)
        life.device.resize(SMALLER_BYTES)
        await owned_again(life, epoch)
        assert bench.loop.clock() - began_ns >= 5_000_000_000 + GRACE_NS
        await expect(life, inside)
        await life.kill()

    direct = replace(base(), direct=True)
    assert direct.bench().run(work)


def test_one_that_grows_again_meanwhile_has_lost_what_was_beyond_its_end() -> None:
    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        epoch = life.session.superblock.stamp.epoch
        life.device.resize(SMALLER_BYTES)
        life.device.resize(SIZE_BYTES)
        await owned_again(life, epoch)
        assert life.session.superblock.layout.size_bytes == SMALLER_BYTES
        await expect(life, inside)
        await life.kill()

    assert base().bench().run(work)


def test_what_may_still_land_on_a_broken_connection_is_waited_for() -> None:
    async def work(bench: CrashBench) -> None:
        life, inside = await filled(bench)
        epoch = life.session.superblock.stamp.epoch
        await life.delete(*sorted(inside)[:2])
        storing = asyncio.create_task(life.save(b"cut short", size_bytes=9000))
        await asyncio.sleep(0.000_1)
        life.device.break_connection(1_000_000)
        settles_at_ns = life.device.settles_at_ns
        assert await storing != ["stored"]
        assert life.store.engine.usage().quarantined_au
        life.device.resize(SMALLER_BYTES)
        await owned_again(life, epoch)
        assert bench.loop.clock() >= settles_at_ns > 0
        await expect(life, inside - set(sorted(inside)[:2]))
        await life.kill()

    assert base().bench().run(work)


def test_one_that_has_shrunk_too_far_is_given_up_and_says_so() -> None:
    async def work(bench: CrashBench) -> None:
        life, _inside = await filled(bench)
        life.device.resize(2 << 20)
        await asyncio.wait((life.task,), timeout=60)
        assert isinstance(life.task.exception(), CardLost)
        assert "shrunk too far" in str(life.task.exception())
        await life.kill()

    assert base().bench().run(work)
