"""The simulated device and its medium do what their fault models say."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from tests.sim.device import SimDevice
from tests.sim.faults import Faults
from tests.sim.loop import SimLoop
from tests.sim.medium import SECTOR_BYTES, Medium, Written, read_image
from xkv_nvmeof.blockdev import (
    CommandFailed,
    DataCorrupted,
    DeviceOffline,
    DeviceState,
    OutcomeUnknown,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SIZE = 1 << 20
A, B, C = (bytes([letter]) * SECTOR_BYTES for letter in b"ABC")


def _run(work: Callable[[SimLoop], Awaitable[None]], seed: int = 1) -> None:
    async def whole() -> None:
        await work(loop)

    loop = SimLoop(random.Random(seed))
    loop.run(whole())
    loop.close()


def _executed(medium: Medium, offset_bytes: int, data: bytes) -> Written:
    write = Written(offset_bytes, data)
    medium.execute(medium.send(write))
    write.returned = True
    return write


async def _read(device: SimDevice, offset_bytes: int, length_bytes: int) -> bytes:
    buffer = bytearray(length_bytes)
    await device.read_into(offset_bytes, [memoryview(buffer)])
    return bytes(buffer)


# --- the medium -----------------------------------------------------------------------------------------------


def test_each_unflushed_sector_survives_for_itself() -> None:
    medium = Medium(SIZE, 512)
    _executed(medium, 0, A + B)
    images = {read_image(image, 0, 1024) for image in medium.survivors(100)}
    zero = bytes(SECTOR_BYTES)
    assert images == {zero + zero, A + zero, zero + B, A + B}


def test_of_two_unflushed_writes_any_may_survive() -> None:
    medium = Medium(SIZE, 512)
    _executed(medium, 0, A)
    _executed(medium, 0, B)
    images = {read_image(image, 0, SECTOR_BYTES) for image in medium.survivors(100)}
    assert images == {bytes(SECTOR_BYTES), A, B}


def test_a_flush_makes_durable_what_returned_before_it_and_nothing_else() -> None:
    medium = Medium(SIZE, 512)
    _executed(medium, 0, A)
    late = Written(SECTOR_BYTES, B)
    medium.execute(medium.send(late))  # executed, and nobody knows yet
    covered = medium.returned_so_far()
    _executed(medium, 0, C)
    medium.flush(covered)
    images = {read_image(image, 0, 2 * SECTOR_BYTES) for image in medium.survivors(100)}
    assert images == {A + bytes(SECTOR_BYTES), A + B, C + bytes(SECTOR_BYTES), C + B}


def test_a_write_that_was_under_way_may_survive_in_part() -> None:
    medium = Medium(SIZE, 4096)
    medium.send(Written(0, A + B + bytes(6 * SECTOR_BYTES)))
    images = {read_image(image, 0, 2 * SECTOR_BYTES) for image in medium.survivors(1000)}
    assert images == {x + y for x in (A, bytes(SECTOR_BYTES)) for y in (B, bytes(SECTOR_BYTES))}


def test_a_drawn_survivor_is_one_of_those_that_can_be() -> None:
    medium = Medium(SIZE, 512)
    _executed(medium, 0, A + B)
    _executed(medium, 0, C)
    possible = {read_image(image, 0, 1024) for image in medium.survivors(1000)}
    rng = random.Random(1)
    drawn = {read_image(medium.draw_survivor(rng), 0, 1024) for _ in range(300)}
    assert drawn == possible


def test_without_a_volatile_cache_a_write_is_durable_at_once() -> None:
    medium = Medium(SIZE, 512, volatile=False)
    _executed(medium, 0, A)
    assert [read_image(image, 0, SECTOR_BYTES) for image in medium.survivors(10)] == [A]


# --- the device -----------------------------------------------------------------------------------------------


def test_what_was_written_is_read_and_counted() -> None:
    async def work(loop: SimLoop) -> None:
        device = SimDevice(loop, Medium(SIZE, 512), random.Random(1), Faults())
        await device.write_from(512, [memoryview(A), memoryview(B)[:100], memoryview(B)[100:]])
        assert await _read(device, 0, 2048) == bytes(512) + A + B + bytes(512)
        await device.flush()
        await device.deallocate([])
        counters = device.counters
        assert (counters.write_commands, counters.write_bytes) == (1, 1024)
        assert (counters.read_commands, counters.read_bytes, counters.flush_commands) == (1, 2048, 1)
        assert not device.medium.cache

    _run(work)


def test_a_broken_connection_leaves_outcomes_unknown_and_some_writes_land_late() -> None:
    seen: set[tuple[str, str]] = set()

    async def work(loop: SimLoop) -> None:
        device = SimDevice(loop, Medium(SIZE, 512), random.Random(loop.clock() + len(seen)), Faults())
        device._rng = loop._rng
        states: list[DeviceState] = []
        device.add_state_listener(lambda state, _: states.append(state))
        writing = asyncio.create_task(device.write_from(0, [memoryview(A)]))
        await asyncio.sleep(1e-6)
        device.break_connection(1000)
        with pytest.raises(OutcomeUnknown) as caught:
            await writing
        with pytest.raises(DeviceOffline):
            await device.flush()
        await asyncio.sleep(0.01)
        assert states == [DeviceState.OFFLINE, DeviceState.ONLINE]
        soon = await _read(device, 0, 512)
        await asyncio.sleep((caught.value.settles_at_ns - loop.clock()) / 1e9)
        settled = await _read(device, 0, 512)
        await asyncio.sleep(1000)
        assert await _read(device, 0, 512) == settled, "a write landed after it was settled"
        seen.add((soon[:1].decode(), settled[:1].decode()))

    for seed in range(60):
        _run(work, seed)
    assert seen == {("A", "A"), ("\0", "A"), ("\0", "\0")}


def test_a_write_that_is_cancelled_ends_its_association() -> None:
    async def work(loop: SimLoop) -> None:
        faults = Faults(break_on_cancel_probability=1.0)
        device = SimDevice(loop, Medium(SIZE, 512), random.Random(1), faults)
        writing = asyncio.create_task(device.write_from(0, [memoryview(A)]))
        await asyncio.sleep(1e-6)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert device.state is DeviceState.OFFLINE

    _run(work)


def test_errors_come_as_the_contract_names_them() -> None:
    async def work(loop: SimLoop) -> None:
        failing = SimDevice(loop, Medium(SIZE, 512), random.Random(1), Faults(fail_probability=1.0))
        with pytest.raises(CommandFailed):
            await failing.write_from(0, [memoryview(A)])
        corrupting = SimDevice(loop, Medium(SIZE, 512), random.Random(1), Faults(digest_probability=1.0))
        with pytest.raises(DataCorrupted):
            await _read(corrupting, 0, 512)

    _run(work)


def test_flipped_bits_are_transient_or_stay() -> None:
    async def work(loop: SimLoop) -> None:
        medium = Medium(SIZE, 512)
        device = SimDevice(loop, medium, random.Random(1), Faults())
        await device.write_from(0, [memoryview(A)])
        device.faults = Faults(transient_flip_probability=1.0)
        assert await _read(device, 0, 512) != A
        device.faults = Faults()
        assert await _read(device, 0, 512) == A
        device.faults = Faults(persistent_flip_probability=1.0)
        await _read(device, 0, 512)
        device.faults = Faults()
        assert await _read(device, 0, 512) != A
        assert medium.damaged == {0}

    _run(work)


def test_after_a_power_loss_nobody_is_answered() -> None:
    async def work(loop: SimLoop) -> None:
        lost: list[bool] = []
        device = SimDevice(
            loop,
            Medium(SIZE, 512),
            random.Random(1),
            Faults(),
            power_loss_at=2,
            on_power_loss=lambda: lost.append(True),
        )
        await device.write_from(0, [memoryview(A)])
        waiting = asyncio.create_task(device.write_from(512, [memoryview(B)]))
        await asyncio.sleep(100)
        assert not waiting.done()
        assert lost == [True]
        assert all(read_image(image, 512, 512) == bytes(512) for image in device.medium.survivors(10))

    _run(work)


def test_a_caller_that_changes_a_buffer_in_flight_is_found() -> None:
    async def work(loop: SimLoop) -> None:
        device = SimDevice(loop, Medium(SIZE, 512), random.Random(1), Faults())
        data = bytearray(A)
        writing = asyncio.create_task(device.write_from(0, [memoryview(data)]))
        await asyncio.sleep(1e-6)
        data[0] = 0
        with pytest.raises(AssertionError, match="belonged to the device"):
            await writing

    _run(work)
