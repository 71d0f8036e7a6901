"""One run on one card, from the index read to the clean stop (FORMAT.md, "Open" from O4 on, and "Clean stop").

    RECOVERING  lookups and loads are served; the run before may still write, so nothing is written
      |         settled: superblocks and the journal's tail read again, superblocks and run start written
    OWNED       everything is served
      |         (the namespace has shrunk: RECOVERING once more, for what is left)
    CLOSED      checkpoint, clean superblock

`CardLost` may end it at any time: another run has the card, or somebody destroyed it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from xkv_gateway.card import heartbeat, ownership
from xkv_gateway.card.blocks import CardFailed
from xkv_gateway.card.checkpointer import Checkpointer
from xkv_gateway.card.fence import CHECK_AGE_MAX_NS, CardLost, Fence
from xkv_gateway.card.format_errors import NoRoom
from xkv_gateway.card.keeping import Keeper
from xkv_gateway.card.racing import until_one_ends
from xkv_gateway.card.recovery import Recoverer, made_of
from xkv_gateway.card.shrinking import Shrinking
from xkv_gateway.card.structure import BLOCK_BYTES
from xkv_gateway.card.superblock import Chosen
from xkv_gateway.card.tail import tail_moved
from xkv_gateway.card.writer import JournalWriter
from xkv_gateway.core.engine import Engine

if TYPE_CHECKING:
    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.opening import OpenOptions
    from xkv_gateway.card.recovery import Recovery
    from xkv_gateway.card.reservation import Reservation
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.card.superblock import Superblock
    from xkv_nvmeof.blockdev import BlockDevice

log = logging.getLogger(__name__)

CHECKPOINTS: Final = 2
"""A and B."""
PRESSURE_SHARE: Final = 4
"""Stores wait while less than this part (1/4) of the ring would be left for what is under way already."""
RECORD_BYTES_PER_OBJECT: Final = 128
"""What an object that is being stored will take in the journal: its put, its delete and its freed record."""


class Phase(Enum):
    """How far the run is."""

    RECOVERING = "recovering"
    OWNED = "owned"
    CLOSED = "closed"


class CardSession:
    """Everything that one run does to its card beside payloads. Made by `opening.open_card`.

    Args:
        device: the card.
        blocks: access to its structures.
        superblock: the newest whole one.
        first_copy: the copy of the superblock to write first.
        recovery: what was read.
        options: who opens, and how.
        settled_at_ns: from when on the run before certainly cannot write any more.
        run_id: of this run.
        reservation: of the card for this run, where it can be reserved.
        taken: the superblocks are written already (takeover).
        owner_may_live: the run before did not end in order, and nothing but its silence says that it is over.
    """

    def __init__(
        self,
        device: BlockDevice,
        blocks: CardBlocks,
        superblock: Superblock,
        first_copy: int,
        recovery: Recovery,
        options: OpenOptions,
        *,
        settled_at_ns: int,
        run_id: bytes,
        reservation: Reservation | None,
        taken: bool,
        owner_may_live: bool,
    ) -> None:
        self.superblock = superblock
        self.recovery = recovery
        self.phase = Phase.RECOVERING
        self.settled_at_ns = settled_at_ns
        self.journal: JournalWriter | None = None
        self.checkpointer: Checkpointer | None = None
        self.keeper: Keeper | None = None
        """Of tenants and wipes; None before the card is ours."""
        self._device = device
        self._blocks = blocks
        self._first_copy = first_copy
        self._options = options
        self._run_id = run_id
        self.reservation = reservation
        self.taken = taken
        self._owner_may_live = owner_may_live
        self._store: CardStore | None = None
        self._owned = asyncio.Event()
        self._shrinking = Shrinking(device)
        self._smaller = False
        # Only the newest copy is certainly whole before this run has written both.
        self._fence = self._new_fence(copy=1 - first_copy, beating=False)
        self._held_until_ns = 0
        self.engine = self._new_engine()

    def _new_fence(self, *, copy: int, beating: bool) -> Fence:
        clock, wall_clock = self._options.clock, self._options.wall_clock
        return Fence(
            self._device,
            self._blocks,
            self.superblock,
            copy,
            clock=clock,
            wall_clock=wall_clock,
            beating=beating,
            reservation=self.reservation,
        )

    def _new_engine(self) -> Engine:
        # Runs until now, this one included, may have handed out extents, of which the new index knows nothing (R3).
        from_ns = max(self._options.clock(), self.writes_from_ns)
        held_until_ns = ownership.held_until_ns(self.superblock, from_ns)
        self._held_until_ns = max(self._held_until_ns, held_until_ns)
        return Engine(
            self._options.limits_of(self.superblock.layout),
            digest_secret=self.superblock.digest_secret,
            entropy=self._options.entropy,
            restored=self.recovery.restored,
            time_s=self.recovery.resumed_s(self._options.wall_clock()),
            held_until_ns=self._held_until_ns,
        )

    # --- what the store asks --------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        """Whether lookups and loads may be answered from the index now."""
        return self.phase is not Phase.CLOSED and self._fence.fresh

    @property
    def writable(self) -> bool:
        """Whether anything may be written."""
        return self.phase is Phase.OWNED

    @property
    def pressed(self) -> bool:
        """Whether the journal must first be relieved by a checkpoint before more is begun; it is seen to, whatever else goes on."""
        if self.journal is None or self.checkpointer is None or self._store is None:
            return False
        under_way = self.engine.reserved_objects * RECORD_BYTES_PER_OBJECT + self._store.saves * BLOCK_BYTES
        if self.journal.free_bytes - under_way >= self.journal.ring_bytes // PRESSURE_SHARE:
            return False
        self.checkpointer.look(pressed=True)
        return True

    def conflicted(self) -> None:
        """A reservation refused a write: nothing is served before it is known whose the card is."""
        self._fence.suspect()

    # --- the run --------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """See whether the card is still as it was read: lookups can be answered from then on.

        Raises:
            CardLost, DeviceError.
        """
        await self._fence.check()

    @property
    def writes_from_ns(self) -> int:
        """About when writes begin, or have begun."""
        return self.settled_at_ns + (CHECK_AGE_MAX_NS if self._owner_may_live else 0)

    async def owned_soon(self) -> None:
        """Return once everything is served, or at once where the run before has to settle first."""
        if self.settled_at_ns <= self._options.clock():
            await self._owned.wait()

    async def run(self, store: CardStore) -> None:
        """Take the card when it is settled, then keep it, until cancelled.

        Raises:
            CardLost: the card is not ours any more.
            CardFailed: the controller refuses what the card needs.
        """
        self._store = store
        try:
            await self._run(store)
        except (CardLost, CardFailed):
            # Nothing more is served, and above all: nothing more is written, not even in the course of an orderly end.
            self.phase = Phase.CLOSED
            raise

    async def _run(self, store: CardStore) -> None:
        await until_one_ends(self._settle(store), self._fence.run())
        while True:
            await self._make_fit(store)
            await self._serve(store)

    async def _make_fit(self, store: CardStore) -> None:
        """Where the namespace has become smaller than the card was: go on with what is left."""
        left = self._shrinking.left_of(self.superblock.layout)
        if left is None:
            return
        self.superblock = replace(self.superblock, layout=left)
        self._first_copy, self.taken, self._owner_may_live, self._smaller = 1, False, False, True
        self._blocks.unguard()
        await self._read_again(store)

    async def _serve(self, store: CardStore) -> None:
        """Keep the card until the namespace becomes smaller."""
        await self._claim()
        self._fence = self._new_fence(copy=0, beating=False)
        await self._fence.verify()
        self._blocks.guard(self._verify, self.conflicted)
        await until_one_ends(self._take(), self._fence.run())
        journal, checkpointer = self.journal, self.checkpointer
        assert journal is not None
        assert checkpointer is not None
        self._fence = self._new_fence(copy=0, beating=True)
        await self._fence.verify()
        self.phase = Phase.OWNED
        self.keeper = Keeper(
            self._device,
            self._blocks,
            self.superblock,
            self.recovery,
            store,
            journal,
            checkpointer,
            self._options.clock,
        )
        if self._smaller:
            checkpointer.want()  # so that no other run has to drop what is gone
        store.start_journal(journal)
        self._owned.set()
        log.info("the card is ours: epoch %d", self.superblock.stamp.epoch)
        leave = partial(setattr, self, "phase", Phase.RECOVERING)
        await until_one_ends(
            journal.run(),
            self._fence.run(),
            checkpointer.run(),
            self._relieve(store),
            self.keeper.run(),
            self._shrinking.retreat(store, journal, self.superblock.layout, leave),
        )

    async def _relieve(self, store: CardStore) -> None:
        """After each group of records: a checkpoint if it is time; wake stores that wait for the journal."""
        assert self.journal is not None and self.checkpointer is not None  # noqa: PT018
        while True:
            if not self.pressed:
                self.checkpointer.look(pressed=False)
                store.space_may_be_free()
            await self.journal.changed()

    async def _settle(self, store: CardStore) -> None:
        """Wait until nothing of the run before can land any more; then see whether something has landed."""
        if not self._owner_may_live:
            return
        delay_s = max(0, self.settled_at_ns - self._options.clock()) / 1e9
        log.info("writes begin in %.1f s, when the run before certainly cannot write any more", delay_s)
        beat = partial(ownership.read_heartbeat, self._blocks, self.superblock.stamp.card_uuid)
        before = await self._blocks.patiently(beat)
        await asyncio.sleep(delay_s)
        if heartbeat.moved(before, await self._blocks.patiently(beat)):
            raise CardLost(f"its owner lives after all: {self.superblock.owner or 'unknown'}")
        await self._blocks.patiently(self._require_unchanged)
        if await self._blocks.patiently(self._tail_moved):
            log.warning("records of the run before came late: the index is read again")
            await self._read_again(store)

    async def _read_again(self, store: CardStore) -> None:
        async with store.suspended():
            limits = self._options.limits_of(self.superblock.layout)
            recoverer = Recoverer(self._blocks, self.superblock, limits, self._options.clock)
            self.recovery = await self._blocks.patiently(partial(recoverer.run, search=True))
            engine = await made_of(self.recovery, self._new_engine)
            # They may have been changed since the start.
            engine.set_rules(self.engine.rules, self.engine.budget.bytes_per_day)
            self.engine = store.engine = engine

    async def _require_unchanged(self) -> None:
        found = await ownership.read_superblocks(self._blocks, self.superblock.layout.size_bytes)
        if not isinstance(found, Chosen) or found.superblock.stamp != self.superblock.stamp:
            raise CardLost("another gateway opened the card at the same time")

    async def _tail_moved(self) -> bool:
        return await tail_moved(self._blocks, self.superblock, self.recovery.point)

    async def _claim(self) -> None:
        """Write the superblocks (O5, O6)."""
        options, recovery = self._options, self.recovery
        if not self.taken:
            await self._blocks.patiently(self._require_unchanged)
            epoch = 1 + max(self.superblock.stamp.epoch, recovery.epoch_max)
            self.superblock = ownership.owned(
                self.superblock,
                options.owner,
                epoch=epoch,
                run_id=self._run_id,
                wall_ns=options.wall_clock(),
                reservation_key=0 if self.reservation is None else self.reservation.key,
            )
            await ownership.write_both(self._blocks, self.superblock, first_copy=self._first_copy)

    async def _take(self) -> None:
        """Begin the journal of this run (O7)."""
        options, recovery = self._options, self.recovery
        if self._owner_may_live:
            # It may have come back a moment ago, have looked before these were written, and write yet until it looks again.
            await asyncio.sleep(CHECK_AGE_MAX_NS / 1e9)
        if recovery.epoch_max > self.superblock.stamp.epoch or await self._blocks.patiently(self._tail_moved):
            # From both superblocks on nobody else acknowledges anything: what came until then must be read, not written over.
            raise CardLost("another gateway wrote to the card while this one opened it")
        layout, stamp = self.superblock.layout, self.superblock.stamp
        journal = JournalWriter(
            self._blocks,
            layout.journal,
            stamp,
            recovery.point,
            recovery.needed_from,
            self._verify,
            flush=options.flush,
        )
        checkpointer = Checkpointer(
            self._blocks,
            (layout.checkpoint_a, layout.checkpoint_b),
            stamp,
            self.engine,
            journal,
            options.clock,
            (recovery.sequence_max, recovery.newest_in),
            (recovery.starts[0], recovery.starts[1]),
        )
        try:
            await journal.start_run()
        except NoRoom:
            # Runs that died young have used up what is kept free for them. The journal is kept from the start of the older
            # checkpoint on, so only two new ones make room for certain.
            for _ in range(CHECKPOINTS):
                await checkpointer.write(of_what_is_durable=True)
            await journal.start_run()
        self.journal, self.checkpointer = journal, checkpointer

    async def _verify(self) -> None:
        # The fence changes when the run becomes the owner.
        await self._fence.verify()

    async def stop(self) -> bool:
        """End in order: all records durable, a checkpoint, a clean superblock. The caller bounds it; no requests are left.

        Returns:
            Whether the card is clean now.

        Raises:
            CardLost, CardFailed, DeviceError.
        """
        owned, clean = self.phase is Phase.OWNED, False
        try:
            clean = await self._stop()
        finally:
            # What did not end in order stays registered: the next run ends that, and with it what may still land.
            if self.reservation is not None and (clean or not owned):
                await self.reservation.give_up()
        return clean

    async def _stop(self) -> bool:
        if self.phase is not Phase.OWNED or self.journal is None or self.checkpointer is None:
            self.phase = Phase.CLOSED
            return False
        if self.keeper is not None:
            await self.keeper.wiper.rest()
        await self.journal.reached(self.engine.last_lsn)
        await self._fence.verify()
        await self.checkpointer.write()
        await self._fence.verify()
        self.phase = Phase.CLOSED
        if not self._options.exclusive:
            # Clean says that nothing can land any more: a write that got lost on its way may still do so (R4).
            await asyncio.sleep(max(0, self._device.settles_at_ns - self._options.clock()) / 1e9)
        in_use = self._options.owner.hands_out_extents or self._options.clock() < self._held_until_ns
        self.superblock = ownership.closed(self.superblock, extents_in_use=in_use)
        await ownership.write_both(self._blocks, self.superblock, first_copy=0)
        return True
