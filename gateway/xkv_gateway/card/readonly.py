"""A block device that cannot be written to through: what looks at a card gets nothing else into its hands."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_nvmeof.blockdev import (
        BlockDevice,
        ByteRange,
        DeviceCounters,
        DeviceIdentity,
        DeviceState,
        Geometry,
    )


class ReadOnly:
    """Passes reads on; everything that changes the card is a bug of the caller."""

    def __init__(self, device: BlockDevice) -> None:
        self._device = device

    @property
    def geometry(self) -> Geometry:
        """See `BlockDevice`."""
        return self._device.geometry

    @property
    def identity(self) -> DeviceIdentity:
        """See `BlockDevice`."""
        return self._device.identity

    @property
    def state(self) -> DeviceState:
        """See `BlockDevice`."""
        return self._device.state

    @property
    def counters(self) -> DeviceCounters:
        """See `BlockDevice`."""
        return self._device.counters

    @property
    def settles_at_ns(self) -> int:
        """See `BlockDevice`."""
        return self._device.settles_at_ns

    @property
    def incarnation(self) -> int:
        """See `BlockDevice`."""
        return self._device.incarnation

    @property
    def reservations(self) -> None:
        """None: who only looks reserves nothing."""
        return

    def add_state_listener(self, listener: Callable[[DeviceState, str], None]) -> None:
        """See `BlockDevice`."""
        self._device.add_state_listener(listener)

    def add_geometry_listener(self, listener: Callable[[Geometry, Geometry], None]) -> None:
        """Call `listener` when the namespace has grown or shrunk."""
        self._device.add_geometry_listener(listener)

    async def read_into(self, offset_bytes: int, buffers: Sequence[memoryview]) -> None:
        """See `BlockDevice`."""
        await self._device.read_into(offset_bytes, buffers)

    async def write_from(self, offset_bytes: int, buffers: Sequence[memoryview]) -> NoReturn:  # noqa: ARG002 - the contract's
        """Refuse."""
        raise AssertionError("a write to a card that is only looked at")

    async def flush(self) -> NoReturn:
        """Refuse."""
        raise AssertionError("a flush of a card that is only looked at")

    async def deallocate(self, ranges: Sequence[ByteRange]) -> NoReturn:  # noqa: ARG002 - the contract's
        """Refuse."""
        raise AssertionError("a deallocation on a card that is only looked at")

    async def write_zeroes(self, byte_range: ByteRange) -> NoReturn:  # noqa: ARG002 - the contract's
        """Refuse."""
        raise AssertionError("a write to a card that is only looked at")

    async def aclose(self) -> None:
        """Leave the device to whoever made it."""
