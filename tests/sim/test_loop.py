"""The virtual-time loop itself."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.sim.loop import Deadlock, Livelock, SimLoop


async def _three_hours() -> None:
    queue: asyncio.Queue[int] = asyncio.Queue(2)
    lock = asyncio.Lock()

    async def produce(count: int) -> None:
        for number in range(count):
            await queue.put(number)
            await asyncio.sleep(number % 3)

    async def consume() -> None:
        while True:
            async with lock:
                await queue.get()
            await asyncio.sleep(0)

    consumers = [asyncio.create_task(consume()) for _ in range(3)]
    async with asyncio.timeout(20_000), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(produce(6))
        group.create_task(asyncio.sleep(3 * 3600))
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)


def _trace(seed: int) -> str:
    loop = SimLoop(random.Random(seed), keep_trace=True)
    try:
        loop.run(_three_hours())
        return loop.trace()
    finally:
        loop.close()


def test_the_same_seed_gives_the_same_trace() -> None:
    assert len({_trace(7) for _ in range(10)}) == 1


def test_200_seeds_give_many_interleavings() -> None:
    assert len({_trace(seed) for seed in range(200)}) > 190


def test_plain_callbacks_keep_their_order() -> None:
    for seed in range(20):
        loop = SimLoop(random.Random(seed))
        seen: list[int] = []

        async def work(loop: SimLoop = loop, seen: list[int] = seen) -> None:
            for number in range(50):
                loop.call_soon(seen.append, number)
                if number % 5 == 0:
                    asyncio.create_task(asyncio.sleep(0))  # noqa: RUF006 - ends by itself
            await asyncio.sleep(1)

        loop.run(work())
        loop.close()
        assert seen == list(range(50))


def test_a_deadlock_is_reported() -> None:
    async def wait_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    loop = SimLoop(random.Random(1))
    with pytest.raises(Deadlock, match="no timer is armed"):
        loop.run(wait_for_ever())
    loop.close()


def test_a_livelock_is_reported() -> None:
    async def spin() -> None:
        while True:  # noqa: ASYNC110 - it shall spin
            await asyncio.sleep(0)

    loop = SimLoop(random.Random(1))
    with pytest.raises(Livelock):
        loop.run(spin())
    loop.close()


def test_a_failing_callback_fails_the_run() -> None:
    async def work() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)

    loop = SimLoop(random.Random(1))
    with pytest.raises(ZeroDivisionError):
        loop.run(work())
    loop.close()


def test_work_for_a_thread_runs_on_the_loop() -> None:
    async def work() -> None:
        assert await asyncio.to_thread(sum, [1, 2]) == 3
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    loop = SimLoop(random.Random(1))
    loop.run(work())
    loop.close()
