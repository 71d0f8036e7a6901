"""Who owns the card: the owner proves that it lives, and looks before it acknowledges anything.

A superblock names the run that owns the card. Whoever takes the card over writes its own there first, so an owner that
reads it after a batch is durable, and before anybody hears of it, can never acknowledge what the next owner will not find. Where
the card can be reserved, the owner has it reserved, and looks after that too. The heartbeat tells an opener that the owner lives; it proves nothing to the owner itself.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from xkv_gateway.card import heartbeat as heartbeat_format
from xkv_gateway.card import superblock as superblock_format
from xkv_gateway.card.blocks import RETRY_DELAY_S
from xkv_gateway.card.format_errors import BadChecksum, FormatError
from xkv_gateway.card.heartbeat import Heartbeat
from xkv_gateway.card.layout import HEARTBEAT_OFFSET
from xkv_gateway.card.structure import BLOCK_BYTES, is_blank
from xkv_nvmeof.blockdev import (
    CommandFailed,
    DataCorrupted,
    DeviceError,
    DeviceState,
    ReservationConflict,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.reservation import Reservation
    from xkv_gateway.card.superblock import Superblock
    from xkv_nvmeof.blockdev import BlockDevice

log = logging.getLogger(__name__)

INTERVAL_MS: Final = 1000
CHECK_AGE_MAX_NS: Final = 2_000_000_000
"""Nothing is served on an older look at the superblock."""


NAME_LOOKS_MAX: Final = 10
"""So often the loser of a reservation looks for the name of who has it."""


class CardLost(Exception):  # noqa: N818
    """The card is not ours any more. The message says whose it is, or what became of it."""


class Fence:
    """Watches over the ownership of one card.

    Args:
        device: the card.
        blocks: access to it.
        superblock: as this run wrote it, or found it.
        copy: which copy to look at.
        clock: monotonic ns.
        wall_clock: ns since 1970, for people.
        beating: whether this run owns the card already; else it only watches that nobody else takes it.
        reservation: of the card, where it can be reserved.
    """

    def __init__(
        self,
        device: BlockDevice,
        blocks: CardBlocks,
        superblock: Superblock,
        copy: int,
        *,
        clock: Callable[[], int],
        wall_clock: Callable[[], int],
        beating: bool,
        reservation: Reservation | None = None,
    ) -> None:
        self._device = device
        self._blocks = blocks
        self._superblock = superblock
        self._copy = copy
        self._clock = clock
        self._wall_clock = wall_clock
        self._beating = beating
        self._reservation = reservation
        self._doubts = 1
        self._settled_doubts = 0
        """Of the reservation: it is looked at when there are more doubts than were settled."""
        self._checked_at_ns: int | None = None
        self._ours: dict[int, bytes] = {}
        """The copies as they were judged to be ours: they are looked at all the time, and hardly ever differ."""
        self._beat = 0
        self._look = asyncio.Event()
        self._damage_told = False
        self.lost: str | None = None
        """Why the card is not ours any more."""
        device.add_state_listener(self._changed)

    def _changed(self, state: DeviceState, reason: str) -> None:  # noqa: ARG002
        # Behind a new connection there may be another card, or another owner.
        self.suspect()

    def suspect(self) -> None:
        """Trust nothing before the next look, which is closer than usual, and soon."""
        self._doubts += 1
        self._checked_at_ns = None
        self._look.set()

    @property
    def fresh(self) -> bool:
        """Whether the card was certainly ours a moment ago."""
        at_ns = self._checked_at_ns
        return self.lost is None and at_ns is not None and self._clock() - at_ns <= CHECK_AGE_MAX_NS

    async def verify(self) -> None:
        """Look at the superblock now; waits while the card is away.

        Raises:
            CardLost: it names another run, or is none.
        """
        while True:
            await self._blocks.online()
            try:
                await self.check()
            except DeviceError:
                await asyncio.sleep(RETRY_DELAY_S)
            else:
                return

    async def check(self) -> None:
        """Look at the superblock now.

        Raises:
            CardLost: it names another run, or is none.
            DeviceError: it could not be read.
        """
        if self.lost is not None:
            raise CardLost(self.lost)
        asked_at_ns = self._clock()
        await self._look_at_superblock()
        doubts = self._doubts
        if self._reservation is not None and doubts != self._settled_doubts:
            await self._hold(self._reservation)
            # It may have been free because its owner has only just begun, or ended.
            await self._look_at_superblock()
            self._settled_doubts = doubts
        self._checked_at_ns = asked_at_ns

    async def _hold(self, reservation: Reservation) -> None:
        try:
            await reservation.hold()
        except CardLost as lost:
            # Who took it writes its name into the superblock next. Nothing is served meanwhile.
            for _ in range(NAME_LOOKS_MAX):
                with suppress(DeviceError, BadChecksum):
                    self.lost = await self._judge(self._copy)
                if self.lost is not None:
                    break
                await asyncio.sleep(RETRY_DELAY_S)
            self.lost = self.lost or str(lost)
            raise CardLost(self.lost) from lost

    async def _look_at_superblock(self) -> None:
        try:
            self.lost = await self._judge(self._copy)
        except (CommandFailed, DataCorrupted, BadChecksum) as error:
            if not self._beating:
                if isinstance(error, DeviceError):
                    raise
                self.lost = f"the card was overwritten: {error}"
            else:
                self.lost = await self._judge_other_copy(error)
        if self.lost is not None:
            raise CardLost(self.lost)

    async def _judge_other_copy(self, error: Exception) -> str | None:
        """One copy is damaged: this run has written both, and so does whoever takes the card, before anything else."""
        if not self._damage_told:
            self._damage_told = True
            log.error(
                "copy %d of the superblock is damaged, the other one is looked at: %s", self._copy, error
            )
        try:
            return await self._judge(1 - self._copy)
        except BadChecksum as other:
            return f"both superblocks are damaged: {other}"

    async def _judge(self, copy: int) -> str | None:
        """Read a copy of the superblock; return why the card is not ours.

        Raises:
            BadChecksum: it is ours by its magic, and damaged.
            DeviceError: it could not be read.
        """
        block = await self._blocks.read(self._superblock.layout.superblock_offsets[copy], BLOCK_BYTES)
        seen = bytes(block)
        if seen == self._ours.get(copy):
            return None
        if is_blank(block):
            return "the card was zeroed: its superblock is gone"
        try:
            found = superblock_format.decode(block, copy)
        except BadChecksum:
            raise
        except FormatError as error:
            return f"the card was overwritten: {error}"
        if found.stamp.card_uuid != self._superblock.stamp.card_uuid:
            return f"the card was formatted anew, or is another one (owner {found.owner or 'unknown'})"
        if found.stamp != self._superblock.stamp:
            return (
                f"the card was taken over by {found.owner or 'an unknown owner'} (process {found.owner_pid})"
            )
        self._ours[copy] = seen
        return None

    async def run(self) -> None:
        """Beat and look, each second, for ever.

        Raises:
            CardLost: the card is not ours any more.
        """
        while True:
            self._look.clear()
            self._doubts += 1
            if self._device.state is DeviceState.ONLINE:
                try:
                    await self.check()
                    if self._beating:
                        await self._write_beat()
                except ReservationConflict:
                    self.suspect()
                    await asyncio.sleep(RETRY_DELAY_S)
                except DeviceError as error:
                    log.debug("no heartbeat: %s", error)
            try:
                async with asyncio.timeout(INTERVAL_MS / 1000):
                    await self._look.wait()
            except TimeoutError:
                continue

    async def _write_beat(self) -> None:
        self._beat += 1
        block = heartbeat_format.encode(
            Heartbeat(
                stamp=self._superblock.stamp,
                beat=self._beat,
                superblock_sequence=self._superblock.sequence,
                wall_time_ns=self._wall_clock(),
                interval_ms=INTERVAL_MS,
                owner=self._superblock.owner,
            )
        )
        # Every beat differs, so one of unknown outcome needs no rewriting: the next one follows in a second.
        await self._device.write_from(HEARTBEAT_OFFSET, [memoryview(block)])
