"""Tenants and wipes of one run on one card: the ledgers are kept up to date, and wipes are carried out.

Made when the card is ours and nothing has been recorded yet: what a ledger knows and the journal may lack is recorded first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.blocks import CardFailed
from xkv_gateway.card.eraser import Eraser
from xkv_gateway.card.register import Register
from xkv_gateway.card.runs import DataArea
from xkv_gateway.card.wipe import Wiper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from xkv_gateway.card.blocks import CardBlocks
    from xkv_gateway.card.checkpointer import Checkpointer
    from xkv_gateway.card.recovery import Recovery
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.card.superblock import Superblock
    from xkv_gateway.card.writer import JournalWriter
    from xkv_nvmeof.blockdev import BlockDevice

CHANGE_S_MAX: Final = 30.0
"""How long an operator's change may wait for the card."""


class Keeper:
    """What the run does for tenants and wipes.

    Args:
        device: the card.
        blocks: access to its structures.
        superblock: of this run.
        recovery: what was read.
        store: the running card.
        journal: its journal.
        checkpointer: its checkpoints.
        clock: monotonic ns.
    """

    def __init__(
        self,
        device: BlockDevice,
        blocks: CardBlocks,
        superblock: Superblock,
        recovery: Recovery,
        store: CardStore,
        journal: JournalWriter,
        checkpointer: Checkpointer,
        clock: Callable[[], int],
    ) -> None:
        layout = superblock.layout
        self.register = Register(blocks, superblock, recovery.ledger, store.engine, journal, checkpointer)
        self.repaired = self.register.repair(
            recovery.lost_wipes, doubt=recovery.tenants_in_doubt, again=recovery.rows_beyond
        )
        area = DataArea(layout.data.offset_bytes, layout.au_bytes, layout.block_bytes)
        self.eraser = Eraser(device, blocks, area, clock)
        self.wiper = Wiper(store, self.register, self.eraser, clock)
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Keep and wipe, for ever. Raises CardFailed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.register.run(), name="register")
                tasks.create_task(self.wiper.run(), name="wiper")
        except* CardFailed as group:
            raise CardFailed(str(group.exceptions[0])) from group
        finally:
            self._ended.set()

    async def until_ended(self, work: Awaitable[None]) -> bool:
        """Wait for work that the run carries out. False: the run ended first, or it took too long (then that is unknown)."""
        tasks = [asyncio.ensure_future(work), asyncio.ensure_future(self._ended.wait())]
        try:
            await asyncio.wait(tasks, timeout=CHANGE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            return tasks[0].done()
        finally:
            for task in tasks:
                task.cancel()
