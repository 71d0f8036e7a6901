"""Erases the units of wiped objects, and looks whether they are gone.

    objects that nobody reads or writes any more  ->  deallocate, where the device promises zeroes for that; else write zeroes
      ->  flush  ->  read back: all zero?  (no: write zeroes over it, and look again)  ->  free

Where a command's outcome is unknown it is sent again, and the units are not free before the old one can no longer be executed: it
would fall on the next object (R4).
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from xkv_nvmeof.blockdev import ByteRange, CommandFailed, DataCorrupted, DeviceError, OutcomeUnknown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.runs import DataArea
    from xkv_gateway.core.types import ErasePlan
    from xkv_nvmeof.blockdev import BlockDevice

log = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 20
"""Read back, and written, at a time."""
PIECES_IN_FLIGHT: Final = 4
RANGES_MAX: Final = 256
"""Ranges of one deallocation, as one command takes."""
RETRY_DELAY_S: Final = 0.05


class Method(Enum):
    """How units are erased; the first that the device can do and that works."""

    DEALLOCATE = "deallocate"
    WRITE_ZEROES = "write zeroes"
    WRITE = "write"


class EraseFailed(Exception):  # noqa: N818
    """The device refuses, or gives back other bytes than zeroes."""


class Eraser:
    """Erases on one device.

    Args:
        device: the card.
        blocks: tells when it can be reached.
        area: its data area.
        clock: monotonic ns.
    """

    def __init__(
        self, device: BlockDevice, blocks: CardBlocks, area: DataArea, clock: Callable[[], int]
    ) -> None:
        self._device = device
        self._blocks = blocks
        self._area = area
        self._clock = clock
        self._zeroes = memoryview(bytes(PIECE_BYTES))
        self._gate = asyncio.Semaphore(PIECES_IN_FLIGHT)
        self._settles_at_ns = 0
        self._broken: set[Method] = set()
        """What the device said it can, and cannot."""
        self.erased_bytes = 0
        self.retries = 0

    @property
    def method(self) -> Method:
        """How units are erased now."""
        return next(self._methods())

    def _methods(self) -> Iterator[Method]:
        geometry = self._device.geometry
        if geometry.can_deallocate and geometry.deallocate_zeroes and Method.DEALLOCATE not in self._broken:
            yield Method.DEALLOCATE
        if geometry.can_write_zeroes and Method.WRITE_ZEROES not in self._broken:
            yield Method.WRITE_ZEROES
        yield Method.WRITE

    async def erase(self, plans: Sequence[ErasePlan]) -> int:
        """Erase the units of these; afterwards they hold zeroes, durably, and nothing can land on them any more.

        Returns:
            How many bytes.

        Raises:
            EraseFailed: not with any method; try again later.
        """
        ranges = self._ranges(plans)
        self._settles_at_ns = 0
        for method in self._methods():
            try:
                await self._apply_durably(method, ranges)
                await self._settled()
                if await self._all_zero(ranges):
                    size_bytes = sum(each.length_bytes for each in ranges)
                    self.erased_bytes += size_bytes
                    return size_bytes
            except CommandFailed as error:
                log.warning("the device refused to erase (%s): %s", method.value, error)
            else:
                log.error("after it was told to erase (%s) the device gave back other bytes", method.value)
            await self._settled()
            self._broken.add(method)
        self._broken.clear()
        raise EraseFailed("the device does not erase")

    def _ranges(self, plans: Sequence[ErasePlan]) -> list[ByteRange]:
        """Byte ranges of all units, neighbours joined."""
        extents = sorted(extent for plan in plans for extent in plan.extents)
        ranges: list[ByteRange] = []
        area = self._area
        for start_au, count_au in extents:
            offset = area.start_bytes + start_au * area.au_bytes
            length = count_au * area.au_bytes
            if ranges and ranges[-1].offset_bytes + ranges[-1].length_bytes == offset:
                ranges[-1] = ByteRange(ranges[-1].offset_bytes, ranges[-1].length_bytes + length)
            else:
                ranges.append(ByteRange(offset, length))
        return ranges

    async def _apply_durably(self, method: Method, ranges: Sequence[ByteRange]) -> None:
        """Erase and flush; again where the target may have lost its power in between. Raises CommandFailed; CardLost."""
        while True:
            incarnation = self._device.incarnation
            await self._apply(method, ranges)
            await self._patiently(self._device.flush)
            if self._device.incarnation == incarnation:
                return
            self.retries += 1

    async def _apply(self, method: Method, ranges: Sequence[ByteRange]) -> None:
        if method is Method.DEALLOCATE:
            for first in range(0, len(ranges), RANGES_MAX):
                part = ranges[first : first + RANGES_MAX]
                await self._patiently(lambda part=part: self._device.deallocate(part))  # type: ignore[misc]
        elif method is Method.WRITE_ZEROES:
            await self._each(ranges, self._device.write_zeroes)
        else:
            await self._each(
                _pieces(ranges),
                lambda piece: self._device.write_from(
                    piece.offset_bytes, [self._zeroes[: piece.length_bytes]]
                ),
            )

    async def _each(self, ranges: Sequence[ByteRange], work: Callable[[ByteRange], Awaitable[None]]) -> None:
        async def one(each: ByteRange) -> None:
            async with self._gate:
                await self._patiently(lambda: work(each))

        results = await asyncio.gather(*(one(each) for each in ranges), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _patiently(self, command: Callable[[], Awaitable[None]]) -> None:
        """Send a command until it is certain that it was carried out. Raises CommandFailed; CardLost."""
        while True:
            await self._blocks.writable()
            try:
                await command()
            except CommandFailed:
                raise
            except OutcomeUnknown as error:
                self._settles_at_ns = max(self._settles_at_ns, error.settles_at_ns)
            except DeviceError as error:
                log.debug("erasing again: %s", error)
            else:
                return
            self.retries += 1
            await asyncio.sleep(RETRY_DELAY_S)

    async def _settled(self) -> None:
        """Wait until nothing of an attempt that got lost can be executed any more."""
        delay_s = (self._settles_at_ns - self._clock()) / 1e9
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _all_zero(self, ranges: Sequence[ByteRange]) -> bool:
        """Read everything back."""
        dirty = False

        async def look(piece: ByteRange) -> None:
            nonlocal dirty
            if dirty:
                return
            buffer = memoryview(bytearray(piece.length_bytes))
            try:
                await self._device.read_into(piece.offset_bytes, [buffer])
            except DataCorrupted:
                dirty = True
                return
            dirty = dirty or bool(np.frombuffer(buffer, np.uint64).any())

        await self._each(_pieces(ranges), look)
        return not dirty


def _pieces(ranges: Sequence[ByteRange]) -> list[ByteRange]:
    return [
        ByteRange(at, min(PIECE_BYTES, each.offset_bytes + each.length_bytes - at))
        for each in ranges
        for at in range(each.offset_bytes, each.offset_bytes + each.length_bytes, PIECE_BYTES)
    ]
