"""What must not be forgotten on a running card: tenants and wipes, in the journal first and then in a ledger.

change in the engine  ->  records durable in the journal  ->  ledger with all changes up to then  ->  acknowledged

Changes that come while a ledger is being written share the next one.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.administration import TooManyTenants
from xkv_gateway.card.layout import ledger_rows_max
from xkv_gateway.card.ledger import LedgerWriter
from xkv_gateway.card.ledger_format import RowStage, WipeRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.checkpointer import Checkpointer
    from xkv_gateway.card.ledger import LedgerReading
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.card.writer import JournalWriter
    from xkv_gateway.core.engine import Engine

log = logging.getLogger(__name__)

STATEMENTS: Final = 1
"""Rows that are of no tenant: what is known of all."""
WIPES_MAX: Final = 256
"""Wipes that a ledger has room for, beside the tenants."""
WIPES_BEFORE_CHECKPOINT: Final = 64
"""Wipes that are done and wait for checkpoints to be forgotten; beyond that one is written."""


class Register:
    """Keeps the ledgers of one run up to date.

    Args:
        blocks: access to the card.
        superblock: of this run.
        reading: the ledgers as they were found.
        engine: whose tenants these are.
        journal: that engine's journal.
        checkpointer: of that engine.
    """

    def __init__(
        self,
        blocks: CardBlocks,
        superblock: Superblock,
        reading: LedgerReading,
        engine: Engine,
        journal: JournalWriter,
        checkpointer: Checkpointer,
    ) -> None:
        layout, stamp = superblock.layout, superblock.stamp
        self._writer = LedgerWriter(blocks, layout, stamp, reading)
        self._certain = reading.certain
        self._engine = engine
        self._journal = journal
        self._checkpointer = checkpointer
        self.wipes: dict[int, WipeRow] = dict(reading.wipes)
        """By LSN."""
        self.tenants_max = (
            min(ledger_rows_max(each.length_bytes) for each in (layout.ledger_a, layout.ledger_b))
            - WIPES_MAX
            - STATEMENTS
        )
        self._wanted = asyncio.Event()
        self._moved = asyncio.Condition()
        self._asked = 0
        self._written = 0

    @property
    def ledgers_written(self) -> int:
        """Ledgers written by this run."""
        return self._writer.written

    # --- before the run serves ------------------------------------------------------------------------------

    def repair(self, lost_wipes: Sequence[WipeRow], *, doubt: bool, again: bool) -> bool:
        """Record what the journal may lack, before anything else is recorded.

        Args:
            lost_wipes: wipes that only a ledger knows; recovery has carried them out.
            doubt: damage may have taken tenants away, and nothing tells.
            again: rows of a ledger are newer than the journal, or the journal has gaps.

        Returns:
            Whether anything was recorded.
        """
        for wipe in lost_wipes:
            del self.wipes[wipe.lsn]
            lsn = self._engine.wiping.record_again(wipe.namespace, wipe.scope)
            self.wipes[lsn] = replace(wipe, lsn=lsn, stage=RowStage.DURABLE)
        if again:
            self._engine.quotas.record_again()
            self._engine.lifetimes.record_again()
        if doubt and self._engine.quotas.known:
            log.error(
                "damage may have taken quotas away: nothing is evicted for having none until that is confirmed"
            )
            self._engine.quotas.set_known(known=False)
        repaired = bool(lost_wipes) or again or doubt
        if repaired or not self._certain:
            # Also behind a ledger that is damaged, so that there is a whole one again before anybody changes a tenant.
            self._asked += 1
            self._wanted.set()
        return repaired

    # --- changes --------------------------------------------------------------------------------------------

    async def room(self) -> None:
        """See to it that there is room for one more tenant, or one more rule on lifetimes.

        Raises:
            TooManyTenants: there is none.
        """
        for _ in range(3):
            quotas, lifetimes = self._engine.quotas, self._engine.lifetimes
            removed = len(quotas.removed) + len(lifetimes.removed)
            if len(quotas.by_scope) + len(lifetimes.rules) + removed < self.tenants_max:
                return
            if not removed:
                break
            # Those that were taken out are kept until both checkpoints begin after that.
            await self._checkpointer.write()
            self._prune()
        raise TooManyTenants(f"this card has room for {self.tenants_max} tenants")

    def room_for_wipe(self) -> None:
        """Raise TooManyTenants if there is no room for one more wipe."""
        self._prune()
        if len(self.wipes) >= WIPES_MAX:
            raise TooManyTenants(f"{WIPES_MAX} wipes are under way or wait for a checkpoint")

    def begin_wipe(self, lsn: int, namespace: str, scope: bytes | None) -> None:
        """Enter a wipe whose record was just made."""
        self.wipes[lsn] = WipeRow(lsn, namespace, scope, RowStage.DURABLE)

    def end_wipe(self, lsn: int) -> None:
        """Everything of a wipe is erased."""
        self.wipes[lsn] = replace(self.wipes[lsn], stage=RowStage.ERASED)

    async def saved(self) -> None:
        """Return once everything that was changed so far is durable, in the journal and in a ledger."""
        self._asked += 1
        ticket = self._asked
        self._wanted.set()
        async with self._moved:
            await self._moved.wait_for(lambda: self._written >= ticket)

    # --- the writer -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write a ledger whenever something has changed, for ever. Raises CardFailed."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            ticket = self._asked
            await self._write()
            async with self._moved:
                self._written = ticket
                self._moved.notify_all()
            if sum(row.stage is RowStage.ERASED for row in self.wipes.values()) > WIPES_BEFORE_CHECKPOINT:
                self._checkpointer.want()

    async def _write(self) -> None:
        self._prune()
        quotas, start = self._engine.quotas, self._journal.acknowledged
        end_lsn = self._engine.last_lsn
        tenants = [*quotas.rows(), *quotas.removed.values()]
        ttls = self._engine.lifetimes.rows()
        wipes, known, known_lsn = list(self.wipes.values()), quotas.known, quotas.known_lsn
        await self._journal.reached(end_lsn)
        await self._writer.write(start, end_lsn, tenants, wipes, ttls, known=known, known_lsn=known_lsn)

    def _prune(self) -> None:
        """Forget what nothing that is ever replayed could bring back."""
        settled_lsn = self._checkpointer.settled_lsn
        self._engine.quotas.forget_removed(settled_lsn)
        self._engine.lifetimes.forget_removed(settled_lsn)
        self.wipes = {
            lsn: row
            for lsn, row in self.wipes.items()
            if row.stage is not RowStage.ERASED or lsn >= settled_lsn
        }
