"""The card store: the pure engine joined to a block device and a journal.

Every mutation of the engine happens synchronously inside one turn of the loop. What it recorded goes to the journal
as one batch at the end of that turn (group commit), and what waits for it is called when the batch is durable:

    admit (sync)  ->  I/O and flush (async)  ->  finish (sync)  ->  end of turn: one journal batch  ->  durable: replies
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from xkv_gateway.card.commits import Commits
from xkv_gateway.card.transfer import Transfer
from xkv_gateway.card.turns import Turns
from xkv_gateway.core.types import LookupMode, LookupOutcome
from xkv_nvmeof.blockdev import DeviceState

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from xkv_gateway.card.journal import Journal
    from xkv_gateway.card.runs import DataArea
    from xkv_gateway.core.engine import Engine
    from xkv_gateway.core.types import (
        BeginLoad,
        CommitOutcome,
        Delete,
        DeleteOutcome,
        LeaseId,
        Lookup,
        ReadPlan,
        WritePlan,
    )
    from xkv_nvmeof.blockdev import BlockDevice

POLL_NS = 100_000_000


class CardOffline(Exception):  # noqa: N818
    """The card cannot be reached, or is not certainly ours."""


class CardRecovering(Exception):  # noqa: N818
    """Lookups and loads are served; nothing may be written yet."""


class JournalFull(Exception):  # noqa: N818
    """The journal must be relieved by a checkpoint first; that is under way."""


class Ownership(Protocol):
    """What the run that owns the card knows of it (`session.CardSession`)."""

    @property
    def readable(self) -> bool:
        """Whether lookups and loads may be answered from the index now."""
        ...

    @property
    def writable(self) -> bool:
        """Whether anything may be written."""
        ...

    @property
    def pressed(self) -> bool:
        """Whether the journal has no room for more to begin."""
        ...

    def conflicted(self) -> None:
        """A reservation refused a write: the card may be somebody else's."""
        ...


class Unguarded:
    """Ownership of a card that nobody else can have, and whose journal is never full."""

    readable = True
    writable = True
    pressed = False

    def conflicted(self) -> None:
        """Take no notice."""


class CardStore(Turns):
    """Lookups, pins, leases and durability over one card. All methods are called from the loop.

    Args:
        engine: the index.
        device: the card.
        area: its data area.
        journal: where records go; None: they wait in the engine until `start_journal`.
        clock: monotonic ns.
        ownership: who knows whether the card is ours.
    """

    def __init__(
        self,
        engine: Engine,
        device: BlockDevice,
        area: DataArea,
        journal: Journal | None,
        clock: Callable[[], int],
        ownership: Ownership | None = None,
    ) -> None:
        super().__init__(engine, journal, clock)
        self.device = device
        self.transfer = Transfer(device, area)
        self.commits = Commits(self.commit)
        self._ownership = ownership or Unguarded()
        self._suspended = False
        self._closed = False
        self._loads = 0
        self.saves = 0
        """Stores under way: each takes a batch of the journal of its own at worst."""

    # --- requests that need no I/O ------------------------------------------------------------------------

    @property
    def online(self) -> bool:
        """Whether the card can be reached now, and is certainly ours."""
        return self.device.state is DeviceState.ONLINE and self._ownership.readable and not self._suspended

    @property
    def writable(self) -> bool:
        """Whether it may also be written to."""
        return self._ownership.writable and self.online

    async def writable_by(self, deadline_ns: int) -> bool:
        """Wait until the card may be written to. False when the deadline passed first."""
        while not self.writable:
            now_ns = self.clock()
            if now_ns >= deadline_ns:
                return False
            await self.room(min(deadline_ns, now_ns + POLL_NS))
        return True

    @property
    def pressed(self) -> bool:
        """Whether new stores must wait for the journal."""
        return self._ownership.pressed

    def conflicted(self) -> None:
        """Note that a reservation refused a write."""
        self._ownership.conflicted()

    def lookup(self, request: Lookup) -> LookupOutcome:
        """Answer a lookup; `arm_timer` is due where it granted a lease. While the card is offline all is a miss, at once (R10)."""
        if not self.online:
            each = request.mode is LookupMode.EACH
            return LookupOutcome(0, [None] * len(request.keys) if each else [], None, 0)
        return self.engine.lookup(request, self.clock())

    def delete(self, request: Delete) -> DeleteOutcome:
        """Forget the keys: lookups miss from now on. It survives a restart once the outcome's `lsn` is durable.

        Raises:
            CardOffline, CardRecovering, JournalFull: nothing was changed.
        """
        self.require_writable()
        if self.pressed:
            raise JournalFull
        outcome = self.engine.delete(request, self.clock())
        self.changed()
        return outcome

    def renew(self, lease: LeaseId, ttl_ns: int) -> int:
        """Extend a lease; returns the granted time in ns. Raises UnknownLease."""
        granted_ns = self.engine.renew(lease, ttl_ns, self.clock())
        self.arm_timer()
        return granted_ns

    def release(self, lease: LeaseId) -> None:
        """End a lease. Raises UnknownLease."""
        self.engine.release(lease, self.clock())
        self.changed()

    def begin_load(self, request: BeginLoad) -> list[ReadPlan | None]:
        """Pin what the load will read; everything is a miss while the card is offline."""
        if not self.online:
            return [None] * len(request.keys)
        return self.engine.begin_load(request, self.clock())

    def require_writable(self) -> None:
        """Raise CardOffline or CardRecovering unless the card may be written to."""
        if not self.online:
            raise CardOffline
        if not self._ownership.writable:
            raise CardRecovering

    @property
    def loads(self) -> int:
        """Loads under way: their objects are pinned."""
        return self._loads

    def commit(self, plans: Sequence[WritePlan], checksums: Sequence[int]) -> CommitOutcome:
        """Commit what is complete on the card; visible, and to be acknowledged, once the outcome's LSN is durable."""
        outcome = self.engine.commit_store(plans, checksums, self.clock())
        self._end_turn()  # at once: the journal waits for these records
        return outcome

    # --- the run's part -------------------------------------------------------------------------------------

    def save_begins(self) -> None:
        """Count a store that may have reserved something."""
        self.saves += 1

    def save_ended(self) -> None:
        """Count it off."""
        self.saves -= 1

    def load_begins(self) -> None:
        """Count a load whose objects are pinned."""
        self._loads += 1

    def load_ended(self) -> None:
        """Count it off."""
        self._loads -= 1
        self.space_may_be_free()

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Let everything be a miss, wait for the loads under way; inside, the engine may be replaced."""
        self._suspended = True
        try:
            while self._loads:
                await self.room(self.clock() + POLL_NS)
            yield
        finally:
            self._suspended = False
