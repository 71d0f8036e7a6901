from __future__ import annotations

import asyncio
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.replay.windows import (
    BUFFER_BYTES_MAX,
    SLOT_ALIGNMENT_BYTES,
    WindowPool,
    plan_windows,
)

MESSAGE_BYTES_MAX = 64 * 2**20


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.integers(1, MESSAGE_BYTES_MAX), st.integers(1, 4096), st.integers(1, 64))
def test_a_window_fits_a_message_and_all_windows_fit_the_bound(
    block: int, keys_max: int, concurrency: int
) -> None:
    plan = plan_windows(
        block, keys_max=keys_max, message_bytes_max=MESSAGE_BYTES_MAX, concurrency=concurrency
    )
    assert 1 <= plan.slots <= keys_max
    assert plan.slots * block <= MESSAGE_BYTES_MAX
    assert plan.stride_bytes >= block
    assert plan.stride_bytes % SLOT_ALIGNMENT_BYTES == 0
    assert plan.windows >= 2
    assert plan.buffer_bytes <= BUFFER_BYTES_MAX or plan.windows == 2


def test_slots_of_all_windows_never_overlap_and_poison_stays_in_its_slots() -> None:
    plan = plan_windows(5000, keys_max=3, message_bytes_max=2**20, concurrency=1)
    memory = bytearray(plan.buffer_bytes)

    async def play() -> list[int]:
        pool = WindowPool(plan, memoryview(memory))
        offsets: list[int] = []
        async with asyncio.timeout(60):
            for _ in range(plan.windows):
                async with pool.window() as window:
                    offsets += window.offsets
            async with pool.window() as window:
                window.poison(2)
                first = window.offsets[0]
                assert memory[first : first + 5000] == b"\xa5" * 5000
                assert memory.count(b"\xa5") == 2 * 5000
        pool.close()
        return offsets

    offsets = sorted(asyncio.run(play()))
    assert len(set(offsets)) == plan.windows * plan.slots
    assert all(later - earlier >= 5000 for earlier, later in pairwise(offsets))


async def test_when_all_windows_are_in_use_the_next_one_waits_for_the_first_that_is_free() -> None:
    plan = plan_windows(10, keys_max=1, message_bytes_max=2**20, concurrency=1)
    pool = WindowPool(plan, memoryview(bytearray(plan.buffer_bytes)))
    release, full = asyncio.Event(), asyncio.Event()
    held = 0

    async def hold() -> None:
        nonlocal held
        async with pool.window():
            held += 1
            if held == plan.windows:
                full.set()
            await release.wait()

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(plan.windows + 1):
            group.create_task(hold())
        await full.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert held == plan.windows
        release.set()
    assert held == plan.windows + 1
    pool.close()
