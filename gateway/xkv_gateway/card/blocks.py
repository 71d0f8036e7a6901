"""Reads and writes of the card's own structures, patient where the outcome is unknown.

A block of ours whose write has an unknown outcome may still be written by the target, late. So it is written again
with the same bytes until that certainly succeeded, and with other bytes only when the first one is settled (R4, `echoes`): whichever
comes last, the block is what it should be.

A target that loses its power between a write and the flush that is to cover it has lost the write, and its flush succeeds once it is
back. So both have to belong to one incarnation of the device; otherwise the write is repeated, and the flush with it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeVar

from xkv_gateway.card.echoes import Echoes
from xkv_nvmeof.blockdev import (
    CommandFailed,
    DataCorrupted,
    DeviceError,
    DeviceState,
    OutcomeUnknown,
    ReservationConflict,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from xkv_nvmeof.blockdev import BlockDevice

log = logging.getLogger(__name__)
_T = TypeVar("_T")

REFUSALS_MAX: Final = 3
"""So often a controller may refuse a write of ours before the card counts as failed."""
PASSING_NS: Final = 10_000_000_000
"""So long it may refuse one, however often, of which it says that trying again may help: its own device is being reset, say."""
RETRY_DELAY_S: Final = 0.05
DRAFT_BYTES_MAX: Final = 16 << 20
"""Of a draft so much may wait for its flush: that is kept in memory, to be written again."""


class CardFailed(Exception):  # noqa: N818
    """The controller refuses what the card needs to go on; nothing more can be written."""


class Refusals:
    """The refusals of one piece of work."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._count = 0
        self._since_ns = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def enough(self, error: CommandFailed | DataCorrupted) -> bool:
        """Count one; return whether it is final."""
        now_ns = self._clock()
        if not self._count:
            self._since_ns = now_ns
        self._count += 1
        if self._count < REFUSALS_MAX:
            return False
        final = not isinstance(error, CommandFailed) or error.do_not_retry
        return final or now_ns - self._since_ns >= PASSING_NS


class CardBlocks:
    """Patient access to the card's structures.

    Args:
        device: the card.
        clock: monotonic ns, the device's own.
    """

    def __init__(self, device: BlockDevice, clock: Callable[[], int]) -> None:
        self._device = device
        self._clock = clock
        self._echoes = Echoes()
        self._online = asyncio.Event()
        self._connections = 0
        self._trusted = 0
        """The last connection on which `guard` was satisfied."""
        self._guard: Callable[[], Awaitable[None]] | None = None
        self._suspect: Callable[[], None] | None = None
        if device.state is DeviceState.ONLINE:
            self._online.set()
        device.add_state_listener(self._changed)

    def _changed(self, state: DeviceState, reason: str) -> None:  # noqa: ARG002 - the daemon's log has the reason
        if state is DeviceState.ONLINE:
            self._connections += 1
            self._online.set()
        else:
            self._online.clear()

    async def online(self) -> None:
        """Return once the card can be reached."""
        await self._online.wait()

    def guard(self, verify: Callable[[], Awaitable[None]], suspect: Callable[[], None]) -> None:
        """Behind each new connection write nothing before `verify` has returned: another one may have the card by then.

        So it is after a write that a reservation refused; `suspect` is called then, so that `verify` looks closely.
        """
        self._guard, self._trusted, self._suspect = verify, self._connections, suspect

    def unguard(self) -> None:
        """There is no owner to be kept from writing: a run begins anew."""
        self._guard = self._suspect = None

    async def writable(self) -> None:
        """Return once the card can be reached and may be written to. Raises CardLost, by the guard."""
        await self._online.wait()
        while self._guard is not None and self._trusted != self._connections:
            connection = self._connections
            await self._guard()
            self._trusted = connection
            await self._online.wait()

    async def patiently(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """Read again and again while the card is away."""
        while True:
            await self.online()
            try:
                return await read()
            except DeviceError as error:
                log.debug("reading again: %s", error)
            await asyncio.sleep(RETRY_DELAY_S)

    async def read(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return the bytes.

        Raises:
            DeviceError: they could not be read.
        """
        buffer = memoryview(bytearray(length_bytes))
        await self._device.read_into(offset_bytes, [buffer])
        return buffer

    async def read_surely(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Return the bytes, however long the card is away.

        Raises:
            CardFailed: the controller refused again and again.
        """
        refusals = Refusals(self._clock)
        while True:
            await self._online.wait()
            try:
                return await self.read(offset_bytes, length_bytes)
            except (CommandFailed, DataCorrupted) as error:
                if refusals.enough(error):
                    raise CardFailed(f"the controller refuses to read at {offset_bytes}: {error}") from error
            except DeviceError as error:
                log.debug("reading at %d again: %s", offset_bytes, error)
            await asyncio.sleep(RETRY_DELAY_S)

    async def write(
        self,
        offset_bytes: int,
        buffers: Sequence[bytes | memoryview],
        *,
        flush: bool,
        written: Callable[[], None] | None = None,
    ) -> None:
        """Write, and flush where asked for; returns when that is certain, however long the card is away.

        Args:
            offset_bytes: where.
            buffers: what.
            flush: whether it must survive a loss of power.
            written: called between the write and the flush, which covers whatever has been written until then in this incarnation;
                again where they had to be repeated.

        Raises:
            CardFailed: the controller refused it again and again.
            CardLost: the guard found another owner behind a new connection.
        """
        views = [memoryview(buffer) for buffer in buffers]
        refusals = Refusals(self._clock)
        while True:
            if self._echoes:
                await self._settled(offset_bytes, views)
            await self.writable()
            incarnation = self._device.incarnation
            try:
                await self._send(offset_bytes, views)
                if written is not None:
                    written()
                if flush:
                    await self._device.flush()
            except CommandFailed as error:
                if refusals.enough(error):
                    raise CardFailed(f"the controller refuses to write at {offset_bytes}: {error}") from error
                self._refused(error)
            except DeviceError as error:
                log.debug("writing at %d again: %s", offset_bytes, error)
            else:
                if not flush or self._device.incarnation == incarnation:
                    return
                log.debug(
                    "writing at %d again: the target may have lost its power before the flush", offset_bytes
                )
            await asyncio.sleep(RETRY_DELAY_S)

    async def _send(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Write once, and note what may still come of it."""
        try:
            await self._device.write_from(offset_bytes, views)
        except OutcomeUnknown as error:
            self._echoes.add(offset_bytes, views, error.settles_at_ns)
            raise
        except asyncio.CancelledError:
            # Where that has cut the write short, its association has ended, and the device knows until when it may come.
            self._echoes.add(offset_bytes, views, self._device.settles_at_ns)
            raise

    async def _settled(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        """Return when nothing else that was sent to these blocks can land there any more."""
        while (now_ns := self._clock()) < (at_ns := self._echoes.settled_at_ns(offset_bytes, views, now_ns)):
            log.info(
                "writing at %d in %.1f s, when an earlier write is over", offset_bytes, (at_ns - now_ns) / 1e9
            )
            await asyncio.sleep((at_ns - now_ns) / 1e9)

    def draft(self) -> Draft:
        """Return a group of writes that are made durable together."""
        return Draft(self, self._device)

    def _refused(self, error: CommandFailed) -> None:
        """See to it that nothing more is written before it is known why a reservation refused a write."""
        if not isinstance(error, ReservationConflict):
            return
        if self._suspect is None:
            raise CardFailed(f"another host has reserved the card: {error}") from error
        self._suspect()
        self._trusted = -1

    async def flush(self) -> None:
        """Flush what was written before; returns when that is certain.

        Raises:
            CardFailed: the controller refused it again and again.
            CardLost: another gateway has reserved the card.
        """
        refusals = Refusals(self._clock)
        while True:
            await self._online.wait()
            if refusals:
                await self.writable()
            try:
                await self._device.flush()
            except CommandFailed as error:
                if refusals.enough(error):
                    raise CardFailed(f"the controller refuses to flush: {error}") from error
                self._refused(error)
            except DeviceError as error:
                log.debug("flushing again: %s", error)
            else:
                return
            await asyncio.sleep(RETRY_DELAY_S)


class Draft:
    """Writes that a flush makes durable together: each is kept until it is, and written again where the target may have lost it."""

    def __init__(self, blocks: CardBlocks, device: BlockDevice) -> None:
        self._blocks = blocks
        self._device = device
        self._kept: list[tuple[int, memoryview]] = []
        self._kept_bytes = 0
        self._incarnation = device.incarnation
        """That in which everything that is kept was written."""

    async def write(self, offset_bytes: int, data: bytes | memoryview) -> None:
        """Write; durable once `flush` has returned. `data` must not change before that. Raises as `CardBlocks.write`."""
        if not self._kept:
            self._incarnation = self._device.incarnation
        await self._blocks.write(offset_bytes, [data], flush=False)
        self._kept.append((offset_bytes, memoryview(data)))
        self._kept_bytes += len(data)
        if self._kept_bytes > DRAFT_BYTES_MAX:
            await self.flush()

    async def flush(self) -> None:
        """Make it durable; returns when that is certain, however long the card is away. Raises as `CardBlocks.write`."""
        while True:
            await self._blocks.flush()
            if self._device.incarnation == self._incarnation:
                break
            log.debug(
                "writing %d blocks again: the target may have lost its power before the flush",
                len(self._kept),
            )
            self._incarnation = self._device.incarnation
            for offset_bytes, data in self._kept:
                await self._blocks.write(offset_bytes, [data], flush=False)
        self._kept.clear()
        self._kept_bytes = 0
