"""The direct path: clients that read and write the card themselves, under leases and tickets.

    reserve   room is made as for a store -> rows that are doomed from the start, durable -> extents leave
    commit    (checksums that the client does not say are read back and computed) -> records, durable -> `stored`
    abort     room goes back: at once if the client says that nothing of it can land any more, else after the grace time

The client flushes its own writes before it commits, and the flush must belong to the association by which they went: what the
target lost in between is nothing that anybody here could see.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from xkv_gateway.card.checksum import checksums
from xkv_gateway.card.save import DURABLE_WAIT_NS, Save
from xkv_gateway.card.store import CardOffline
from xkv_gateway.core.errors import UnknownTicket
from xkv_gateway.core.tickets import TicketState
from xkv_gateway.core.types import LeaseId, StoreStatus
from xkv_nvmeof.blockdev import DeviceOffline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_gateway.card.runs import DataArea
    from xkv_gateway.card.store import CardStore
    from xkv_gateway.core.tickets import Ticket
    from xkv_gateway.core.types import BeginStore, Extent, TicketId, WritePlan

ByteRanges = list[list[int]]
"""[offset, length] on the namespace, in bytes, in the order of the payload."""


class TooManyTickets(Exception):  # noqa: N818
    """The scope has as many tickets, or reserved bytes, as it may."""


class TooManyBytes(Exception):  # noqa: N818
    """More than a scope may ever have reserved."""


class WrongCount(Exception):  # noqa: N818
    """Not one checksum for each reserved key."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """What became of the keys of a reservation; a status of None: reserved, and its extents are there."""

    statuses: list[StoreStatus | None]
    ticket: TicketId | None
    extents: list[ByteRanges | None]


class Direct:
    """Reservations and commits on one store.

    Args:
        store: the card store.
        area: its data area.
    """

    def __init__(self, store: CardStore, area: DataArea) -> None:
        self.store = store
        self._area = area
        self._commits: dict[TicketId, asyncio.Future[list[StoreStatus]]] = {}
        self.reading = asyncio.Lock()
        """One object at a time is read back: that bounds the memory."""

    def ranges(self, extents: Sequence[Extent], size_bytes: int) -> ByteRanges:
        """Return where the payload lies: the bytes of whole units, the last cut to the blocks that hold payload."""
        left_bytes = -(-size_bytes // self._area.block_bytes) * self._area.block_bytes
        ranges: ByteRanges = []
        for start_au, count_au in extents:
            length_bytes = min(left_bytes, count_au * self._area.au_bytes)
            ranges.append([self._area.start_bytes + start_au * self._area.au_bytes, length_bytes])
            left_bytes -= length_bytes
        return ranges

    def leased(self, lease: LeaseId) -> tuple[list[ByteRanges], list[int]]:
        """Return where the objects of a lease that was just granted lie, and their checksums, in the order of the hits."""
        found = self.store.engine.leased(lease)
        return [self.ranges(extents, size) for extents, size, _ in found], [each[2] for each in found]

    def find(self, ident: TicketId) -> Ticket:
        """Return the ticket. Raises UnknownTicket."""
        return self.store.engine.tickets.find(ident, self.store.clock())

    def abort(self, ident: TicketId, *, settled: bool) -> None:
        """Give a ticket up.

        Raises:
            UnknownTicket: it ended, is unknown, or is being committed or was.
        """
        ticket = self.find(ident)
        if ticket.state is not TicketState.OPEN:
            msg = "the ticket is being committed, or was"
            raise UnknownTicket(msg)
        self.store.engine.tickets.abort(ticket, self.store.clock(), settled=settled)
        self.store.space_may_be_free()

    async def commit(self, commit: Commit) -> list[StoreStatus]:
        """Carry a commit out, or wait for the one of the same ticket that is under way: the answer is the same.

        Raises:
            CardOffline: nothing was committed; the ticket lives on until its time.
        """
        if not commit.first:
            return await asyncio.shield(commit.answer)
        try:
            return await commit.run()
        finally:
            self.over(commit)

    def over(self, commit: Commit) -> None:
        """The first commit of its ticket is over: who waits for it hears its answer, or that there is none."""
        del self._commits[commit.ticket.ident]
        if commit.ticket.statuses is not None:
            commit.answer.set_result(commit.ticket.statuses)
        else:
            commit.answer.set_exception(CardOffline())
            commit.answer.exception()  # nobody has to wait

    def answer_to(self, ticket: Ticket) -> asyncio.Future[list[StoreStatus]]:
        """Return what the answer to a commit of the ticket will be: one and the same for all that ask until there is one."""
        answer = self._commits.get(ticket.ident)
        if answer is None:
            answer = asyncio.get_running_loop().create_future()
            if ticket.statuses is not None:
                answer.set_result(ticket.statuses)
            else:
                self._commits[ticket.ident] = answer
        return answer


class Reserve(Save):
    """One admitted reservation: admitted as a store, but the writing is the client's.

    Args:
        direct: the direct path.
        request: keys and sizes.
        ttl_ns: how long the ticket shall live.
        deadline_ns: what found no room by then is `no_space`.

    Raises:
        CardOffline, CardRecovering, TooManyTickets, TooManyBytes: nothing was reserved.
    """

    def __init__(self, direct: Direct, request: BeginStore, ttl_ns: int, deadline_ns: int) -> None:
        store, tickets = direct.store, direct.store.engine.tickets
        size_bytes = sum(request.sizes_bytes)
        if size_bytes > tickets.bytes_max:
            raise TooManyBytes
        if not tickets.has_room(request.scope, size_bytes, store.clock()):
            raise TooManyTickets
        super().__init__(direct.store, request, [memoryview(b"")] * len(request.keys), deadline_ns)
        self._direct = direct
        self._ttl_ns = ttl_ns
        self._plans: dict[int, WritePlan] = {}

    async def reserve(self) -> Reserved:
        """Make room and a ticket; returns when its rows are durable. Raises TooManyTickets."""
        store = self._store
        try:
            statuses: list[StoreStatus | None] = list(await self._run())
            return await self._grant(statuses)
        finally:
            if self._plans:
                # Nothing of them has left.
                store.engine.abort_store(list(self._plans.values()), store.clock(), None)
                store.space_may_be_free()
            store.save_ended()

    async def _write(self, plans: dict[int, WritePlan]) -> None:
        """Keep what is reserved: the client writes to it."""
        self._plans.update(plans)

    async def _grant(self, statuses: list[StoreStatus | None]) -> Reserved:
        store, tickets = self._store, self._store.engine.tickets
        extents: list[ByteRanges | None] = [None] * len(statuses)
        places = sorted(self._plans)
        plans = [self._plans[place] for place in places]
        if not plans:
            return Reserved(statuses, None, extents)
        if not store.writable:
            return Reserved(statuses, None, extents)
        scope = self._request.scope
        if not tickets.has_room(scope, sum(plan.size_bytes for plan in plans), store.clock()):
            raise TooManyTickets
        good, ticket, lsn = tickets.grant(self._request, plans, store.clock())
        self._plans.clear()
        store.changed()
        for place, plan, ok in zip(places, plans, good, strict=True):
            statuses[place] = None if ok else StoreStatus.CANCELLED
            extents[place] = self._direct.ranges(plan.extents, plan.size_bytes) if ok else None
        if ticket is None:
            return Reserved(statuses, None, extents)
        known = False
        try:
            known = await store.durable(lsn, store.clock() + DURABLE_WAIT_NS)
        finally:
            if known:
                tickets.begin(ticket, self._ttl_ns, store.clock())
                store.arm_timer()
            else:
                # The extents have not left, and do not leave now.
                tickets.abort(ticket, store.clock(), settled=True)
                store.space_may_be_free()
        if not known:
            failed = [StoreStatus.IO_ERROR if status is None else status for status in statuses]
            return Reserved(list(failed), None, [None] * len(statuses))
        return Reserved(statuses, ticket.ident, extents)


class Commit:
    """One admitted commit. From here on the ticket does not end by its time.

    Args:
        direct: the direct path.
        ident: the ticket.
        sums: a checksum for each reserved key, in their order; None: to be computed.

    Raises:
        UnknownTicket: it ended, or is unknown.
        WrongCount: of checksums.
        CardOffline, CardRecovering: nothing was changed.
    """

    def __init__(self, direct: Direct, ident: TicketId, sums: Sequence[int | None]) -> None:
        self._store = direct.store
        self._direct = direct
        self.ticket = direct.find(ident)
        self._plans = list(self.ticket.plans)
        self._sums = list(sums)
        self.first = self.ticket.state is TicketState.OPEN
        """Whether it is the first of its ticket; else its answer is that of the first."""
        if self.first:
            if len(sums) != len(self._plans):
                raise WrongCount
            self._store.require_writable()
            self._store.engine.tickets.close(self.ticket)
            self._store.save_begins()
        self.answer = direct.answer_to(self.ticket)
        """Of the first one: there is at most one under way."""

    async def run(self) -> list[StoreStatus]:
        """Commit. Returns one status a reserved key.

        Raises:
            CardOffline: nothing was committed; the ticket lives on until its time.
        """
        tickets = self._store.engine.tickets
        try:
            statuses = await self._commit()
        finally:
            if self.ticket.state is TicketState.CLOSING:
                tickets.reopen(self.ticket)
                self._store.changed()
            self._store.save_ended()
        return statuses

    def give_up(self) -> None:
        """Let the ticket live on, instead of `run`."""
        if self.first:
            self._store.engine.tickets.reopen(self.ticket)
            self._store.changed()
            self._store.save_ended()
            self._direct.over(self)

    async def _commit(self) -> list[StoreStatus]:
        store, engine = self._store, self._store.engine
        results: dict[int, StoreStatus] = {}
        for place, plan in enumerate(self._plans):
            if self._sums[place] is None:
                self._sums[place] = await self._read_back(plan)
        if store.engine is not engine or not store.writable:
            raise CardOffline  # it may belong to another one by now
        unread = [place for place, checksum in enumerate(self._sums) if checksum is None]
        if unread:
            engine.abort_store([self._plans[place] for place in unread], store.clock(), None)
            results = dict.fromkeys(unread, StoreStatus.IO_ERROR)
        sums = {place: checksum for place, checksum in enumerate(self._sums) if checksum is not None}
        plans = [self._plans[place] for place in sums]
        outcome = store.commit(plans, list(sums.values()))
        results |= dict(zip(sums, outcome.statuses, strict=True))
        statuses = [results[place] for place in range(len(self._plans))]
        # From here on it has taken effect; what is told of it is known when it is durable, or never.
        self.ticket.plans = []
        known = False
        try:
            known = await store.durable(outcome.lsn, store.clock() + DURABLE_WAIT_NS)
        finally:
            if not known:
                statuses = [StoreStatus.IO_ERROR if each is StoreStatus.STORED else each for each in statuses]
            engine.tickets.done(self.ticket, statuses)
            store.space_may_be_free()
        return statuses

    async def _read_back(self, plan: WritePlan) -> int | None:
        """Return the checksum of what is there; None: it cannot be read."""
        async with self._direct.reading:
            payload = memoryview(bytearray(plan.size_bytes))
            failures = await self._store.transfer.read([(0, plan.extents, payload)])
            if any(isinstance(error, DeviceOffline) for error in failures.values()):
                raise CardOffline
            return None if failures else (await checksums([payload]))[0]
