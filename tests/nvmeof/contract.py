"""The block device contract as tests: what every implementation of `BlockDevice` must do.

Subclass `BlockDeviceContract` with a fixture `device` that yields a fresh, connected device of at least 8 MiB. Nothing
is assumed of its content.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING

import pytest

from xkv_nvmeof.blockdev import ByteRange, CommandFailed, DeviceOffline, DeviceState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_nvmeof.blockdev import BlockDevice

MIB = 1 << 20


def cuts(data: bytes | bytearray, *places: int) -> list[memoryview]:
    """Return views of `data`, cut at `places`."""
    ends = [0, *sorted(places), len(data)]
    return [memoryview(data)[start:end] for start, end in itertools.pairwise(ends)]


async def read(device: BlockDevice, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    await device.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


class BlockDeviceContract:
    async def test_the_geometry_makes_sense(self, device: BlockDevice) -> None:
        geometry = device.geometry
        assert geometry.block_bytes in (512, 4096)
        assert geometry.size_bytes >= 8 * MIB
        assert geometry.preferred_io_bytes >= geometry.block_bytes
        assert geometry.preferred_io_bytes % geometry.block_bytes == 0
        assert device.state is DeviceState.ONLINE

    async def test_the_identity_names_the_namespace(self, device: BlockDevice) -> None:
        identity = device.identity
        assert identity.nqn
        assert identity.nsid >= 1
        assert len(identity.nguid) == len(identity.uuid) == 16
        assert any(identity.nguid) or any(identity.uuid)

    async def test_what_is_written_is_read_whatever_the_buffers(self, device: BlockDevice) -> None:
        rng = random.Random(1)
        block, preferred = device.geometry.block_bytes, device.geometry.preferred_io_bytes
        for size in (block, 2 * block, preferred - block or block, preferred, preferred + block, 3 * MIB):
            offset = rng.randrange(4) * block
            payload, found = rng.randbytes(size), bytearray(size)
            await device.write_from(offset, cuts(payload, 1, size // 3, size // 3, size - 1))
            await device.read_into(offset, cuts(found, size // 2, 7))
            assert found == payload
            assert await read(device, offset, size) == payload

    async def test_the_neighbours_stay_as_they_are(self, device: BlockDevice) -> None:
        block = device.geometry.block_bytes
        before = random.Random(2).randbytes(3 * block)
        await device.write_from(0, [memoryview(before)])
        await device.write_from(block, [memoryview(b"\xaa" * block)])
        assert await read(device, 0, 3 * block) == before[:block] + b"\xaa" * block + before[2 * block :]

    async def test_other_item_sizes_of_buffers_do_not_matter(self, device: BlockDevice) -> None:
        block = device.geometry.block_bytes
        payload = random.Random(3).randbytes(block)
        await device.write_from(0, [memoryview(payload).cast("Q")])
        found = bytearray(block)
        await device.read_into(0, [memoryview(found).cast("H")])
        assert found == payload

    async def test_nothing_to_transfer_is_nothing_to_do(self, device: BlockDevice) -> None:
        await device.read_into(0, [])
        await device.write_from(0, [memoryview(b"")])
        await device.deallocate([])

    async def test_many_calls_at_once_do_not_mix(self, device: BlockDevice) -> None:
        rng = random.Random(4)
        block = device.geometry.block_bytes
        sizes = [rng.choice([1, 1, 2, 8, 40]) * block for _ in range(200)]
        payloads = [rng.randbytes(size) for size in sizes]
        starts = [sum(sizes[:index]) % (6 * MIB) // block * block for index in range(200)]
        placed = dict(zip(starts, payloads, strict=True))
        await asyncio.gather(
            *(device.write_from(start, [memoryview(data)]) for start, data in placed.items())
        )
        found = await asyncio.gather(*(read(device, start, len(data)) for start, data in placed.items()))
        wrapped = sum(sizes) > 6 * MIB
        for data, right in zip(found, placed.values(), strict=True):
            assert wrapped or data == right

    async def test_flush_succeeds_after_writes(self, device: BlockDevice) -> None:
        block = device.geometry.block_bytes
        await device.write_from(0, [memoryview(bytes(block))])
        await device.flush()

    async def lose_connection(self, device: BlockDevice) -> None:
        """End the connection; it comes back by itself. Who cannot do that skips what needs it."""
        pytest.skip("nothing can be lost here")

    async def test_the_incarnation_is_another_one_after_each_loss_and_never_else(
        self, device: BlockDevice
    ) -> None:
        block = device.geometry.block_bytes
        for _ in range(2):
            for _attempt in range(20):
                before = device.incarnation
                await device.write_from(0, [memoryview(bytes(4 * block))])
                await read(device, 0, 4 * block)
                await device.flush()
                if device.incarnation == before:
                    break
            else:
                # Now and then it may, on a machine that sleeps: what nobody could watch counts as a loss.
                pytest.fail("the incarnation changes all the time")
            await self.lose_connection(device)
            async with asyncio.timeout(60):
                while device.state is not DeviceState.ONLINE or device.incarnation == before:  # noqa: ASYNC110 - a state
                    await asyncio.sleep(0.01)
            assert device.incarnation > before

    async def test_write_zeroes_zeroes_exactly_its_range(self, device: BlockDevice) -> None:
        if not device.geometry.can_write_zeroes:
            pytest.skip("the device has no Write Zeroes")
        block = device.geometry.block_bytes
        await device.write_from(0, [memoryview(b"\xff" * MIB)])
        await device.write_zeroes(ByteRange(block, MIB - 2 * block))
        ones = b"\xff" * block
        assert await read(device, 0, MIB) == ones + bytes(MIB - 2 * block) + ones

    async def test_deallocated_ranges_read_as_promised(self, device: BlockDevice) -> None:
        if not device.geometry.can_deallocate:
            pytest.skip("the device has no Deallocate")
        block = device.geometry.block_bytes
        await device.write_from(0, [memoryview(b"\xff" * MIB)])
        await device.deallocate([ByteRange(index * 2 * block, block) for index in range(60)])
        found = await read(device, 0, MIB)
        for index in range(60):
            assert found[(2 * index + 1) * block : (2 * index + 2) * block] == b"\xff" * block
            if device.geometry.deallocate_zeroes:
                assert not any(found[2 * index * block : (2 * index + 1) * block])

    async def test_beyond_the_end_is_a_failed_command(self, device: BlockDevice) -> None:
        block, size = device.geometry.block_bytes, device.geometry.size_bytes
        calls = (
            device.read_into(size, [memoryview(bytearray(block))]),
            device.write_from(size - block, [memoryview(bytes(2 * block))]),
            device.write_zeroes(ByteRange(size, block)),
        )
        for call in calls:
            with pytest.raises(CommandFailed):
                await call
        assert await read(device, size - block, block) is not None

    async def test_a_cancelled_read_leaves_its_buffer_alone(self, device: BlockDevice) -> None:
        await device.write_from(0, [memoryview(b"\xff" * (2 * MIB))])
        for turns in range(6):
            buffer = bytearray(2 * MIB)
            call = asyncio.ensure_future(device.read_into(0, [memoryview(buffer)]))
            await turn_loop(turns)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            buffer[:] = bytes(2 * MIB)
            assert await read(device, 0, 2 * MIB) == b"\xff" * (2 * MIB)
            assert not any(buffer)

    async def test_a_cancelled_write_is_over_when_it_says_so(self, device: BlockDevice) -> None:
        block = device.geometry.block_bytes
        for turns in range(6):
            await device.write_from(0, [memoryview(bytes(MIB))])
            buffer = bytearray(b"\x01" * MIB)
            call = asyncio.ensure_future(device.write_from(0, [memoryview(buffer)]))
            await turn_loop(turns)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            buffer[:] = b"\x02" * MIB
            found = await read(device, 0, MIB)
            assert {found[at : at + block] for at in range(0, MIB, block)} <= {bytes(block), b"\x01" * block}

    async def test_the_counters_count_calls_and_bytes(self, device: BlockDevice) -> None:
        block = device.geometry.block_bytes
        await device.write_from(0, [memoryview(bytes(3 * block))])
        await read(device, 0, 2 * block)
        counters = device.counters
        assert (counters.write_commands, counters.write_bytes) == (1, 3 * block)
        assert (counters.read_commands, counters.read_bytes) == (1, 2 * block)
        assert counters.errors == 0

    async def test_a_closed_device_refuses_at_once_and_says_so_once(self, device: BlockDevice) -> None:
        seen: list[DeviceState] = []
        device.add_state_listener(lambda state, _reason: seen.append(state))
        await device.aclose()
        await device.aclose()
        assert seen == [DeviceState.OFFLINE]
        block = device.geometry.block_bytes
        calls: Sequence[object] = [device.flush(), device.read_into(0, [memoryview(bytearray(block))])]
        for call in calls:
            with pytest.raises(DeviceOffline):
                await call  # type: ignore[misc]


async def turn_loop(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)
