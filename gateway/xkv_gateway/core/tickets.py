"""Tickets: room that clients write to themselves, over their own connection to the card (the direct path).

    grant     reservations become a ticket's; the journal has their rows, doomed from the start (`Stores.record_reserved`)
    OPEN      the client writes; at its time the ticket ends as if it were aborted unsettled
    CLOSING   a commit is under way: it ends the ticket, however long it takes
    DONE      its answer is kept for the ticket's time

What is given back unsettled stays out of use for the grace time: the client may have sent writes until its ticket ended.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from .errors import UnknownTicket
from .types import NO_LSN, StoreStatus, TicketId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .counters import Counters
    from .stores import Stores
    from .types import BeginStore, EngineLimits, Lsn, WritePlan

TICKET_ID_BYTES: Final = 16
EXPIRED_KEYS_PER_TURN: Final = 1 << 12
"""Objects of tickets that are ended in one call, but for those of the last; tickets that are left are over all the same, by the clock."""
NOT_BEGUN_NS: Final = 1 << 63
"""Later than any time."""
_ENDED: Final = "the ticket ended, or never was"


class TicketState(Enum):
    """How far a ticket is; one that ended without a commit is gone."""

    OPEN = "open"
    CLOSING = "closing"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Ticket:
    """One ticket. `statuses` is the answer to its commit, once there is one."""

    ident: TicketId
    request: BeginStore
    """Namespace, scope and keys of what was reserved; the plans are in their order."""
    plans: list[WritePlan]
    size_bytes: int
    deadline_ns: int = NOT_BEGUN_NS
    state: TicketState = TicketState.OPEN
    statuses: list[StoreStatus] | None = None

    @property
    def held_bytes(self) -> int:
        """Payload bytes that it keeps reserved."""
        return 0 if self.state is TicketState.DONE else self.size_bytes


@dataclass(frozen=True, slots=True)
class TicketUsage:
    """Tickets whose room is in clients' hands."""

    tickets: int
    reserved_bytes: int


class Tickets:
    """All tickets of one engine.

    Args:
        limits: of the engine.
        counters: of the engine.
        stores: reserves, commits and aborts.
        entropy: gives that many unguessable bytes.
        enter: called before anything changes, with the time.
    """

    def __init__(
        self,
        limits: EngineLimits,
        counters: Counters,
        stores: Stores,
        entropy: Callable[[int], bytes],
        enter: Callable[[int], int],
    ) -> None:
        self._limits = limits
        self._counters = counters
        self._stores = stores
        self._entropy = entropy
        self._enter = enter
        self.by_id: dict[TicketId, Ticket] = {}
        self._heap: list[tuple[int, TicketId]] = []
        self._scopes: dict[bytes, list[int]] = {}
        """Tickets and reserved bytes of each scope."""

    # --- bounds ---------------------------------------------------------------------------------------------

    @property
    def bytes_max(self) -> int:
        """The most that a scope may have in tickets."""
        return self._limits.leased_bytes_per_scope_max

    def has_room(self, scope: bytes, size_bytes: int, now_ns: int) -> bool:
        """Whether the scope may have one more ticket over so many bytes: its bounds are those of its leases."""
        self._enter(now_ns)
        self.expire(now_ns)
        count, held_bytes = self._scopes.get(scope, (0, 0))
        fits = (
            count < self._limits.leases_per_scope_max
            and held_bytes + size_bytes <= self._limits.leased_bytes_per_scope_max
        )
        self._counters.tickets_refused += not fits
        return fits

    def usage(self) -> TicketUsage:
        """What is out now."""
        held = [ticket for ticket in self.by_id.values() if ticket.state is not TicketState.DONE]
        return TicketUsage(len(held), sum(ticket.size_bytes for ticket in held))

    # --- the life of a ticket -------------------------------------------------------------------------------

    def grant(
        self, request: BeginStore, plans: Sequence[WritePlan], now_ns: int
    ) -> tuple[list[bool], Ticket | None, Lsn]:
        """Make a ticket of reservations (of one request, in the order of its keys). It does not end before `begin`.

        Returns:
            For each plan whether the ticket has it (one that was cancelled meanwhile is given back), the ticket, and the LSN that
            must be durable before its extents leave.
        """
        self._enter(now_ns)
        good = self._stores.still_reserved(plans)
        kept = [plan for plan, ok in zip(plans, good, strict=True) if ok]
        gone = [plan for plan, ok in zip(plans, good, strict=True) if not ok]
        if gone:
            self._stores.abort(gone, None)
        if not kept:
            return good, None, NO_LSN
        lsn = self._stores.record_reserved(kept)
        size_bytes = sum(plan.size_bytes for plan in kept)
        ident = TicketId(self._entropy(TICKET_ID_BYTES))
        ticket = Ticket(ident, request, kept, size_bytes)
        assert ident not in self.by_id, "a ticket id occurs twice"
        self.by_id[ident] = ticket
        self._count(ticket, 1, size_bytes)
        self._counters.tickets_granted += 1
        return good, ticket, lsn

    def begin(self, ticket: Ticket, ttl_ns: int, now_ns: int) -> None:
        """Its rows are durable, and its extents leave: from here on its time counts."""
        ticket.deadline_ns = now_ns + min(ttl_ns, self._limits.lease_ttl_max_ns)
        self._await_end(ticket)

    def find(self, ident: TicketId, now_ns: int) -> Ticket:
        """Return a ticket whose time is not over, in whatever state.

        Raises:
            UnknownTicket: it ended or is unknown.
        """
        ticket = self.by_id.get(ident)
        if ticket is None or ticket.deadline_ns <= now_ns:
            raise UnknownTicket(_ENDED)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """A commit begins: from here on its time does not end it."""
        assert ticket.state is TicketState.OPEN
        ticket.state = TicketState.CLOSING

    def reopen(self, ticket: Ticket) -> None:
        """The commit came to nothing, and may be asked for again while the ticket lasts."""
        assert ticket.state is TicketState.CLOSING
        ticket.state = TicketState.OPEN
        self._await_end(ticket)

    def done(self, ticket: Ticket, statuses: list[StoreStatus]) -> None:
        """The commit has ended; the plans are committed or given back."""
        assert ticket.state is TicketState.CLOSING
        self._count(ticket, 0, -ticket.size_bytes)
        ticket.state, ticket.statuses, ticket.plans = TicketState.DONE, statuses, []
        self._await_end(ticket)
        self._counters.tickets_committed += 1

    def abort(self, ticket: Ticket, now_ns: int, *, settled: bool) -> None:
        """Give an open ticket up; `settled`: no write of the client can land any more."""
        self._enter(now_ns)
        assert ticket.state is TicketState.OPEN
        self._counters.tickets_aborted += 1
        self._end(ticket, None if settled else now_ns + self._limits.direct_grace_ns)

    def expire(self, now_ns: int) -> None:
        """End tickets whose time is over, and no further one after EXPIRED_KEYS_PER_TURN objects."""
        left = EXPIRED_KEYS_PER_TURN
        while left > 0 and self._heap and self._heap[0][0] <= now_ns:
            deadline_ns, ident = heapq.heappop(self._heap)
            ticket = self.by_id.get(ident)
            left -= 1 if ticket is None else 1 + len(ticket.plans)
            if ticket is None or ticket.state is TicketState.CLOSING:
                continue  # its commit ends it, or sees to it that it is looked at again
            if ticket.state is TicketState.DONE:
                self._forget(ticket)
            else:
                self._counters.tickets_expired += 1
                # The time of the grace counts from the end of the ticket, not from when somebody looked.
                self._end(ticket, deadline_ns + self._limits.direct_grace_ns)

    def in_clients_hands(self, unit: int) -> bool:
        """Whether clients may still write to units from this one on, also where their tickets have ended."""
        return self._stores.in_clients_hands(unit)

    def next_deadline(self) -> int | None:
        """When `expire` has something to do."""
        return self._heap[0][0] if self._heap else None

    def check(self) -> dict[bytes, list[int]]:
        """Recompute what scopes hold; for audits, which compare it with what was counted."""
        own: dict[bytes, list[int]] = {}
        for ticket in self.by_id.values():
            held = own.setdefault(ticket.request.scope, [0, 0])
            held[0] += 1
            held[1] += ticket.held_bytes
        return own

    @property
    def counted(self) -> dict[bytes, list[int]]:
        """What was counted for scopes."""
        return self._scopes

    def slots(self) -> list[int]:
        """Slots that open tickets hold; for audits."""
        opened = [ticket for ticket in self.by_id.values() if ticket.state is TicketState.OPEN]
        return [plan.slot for ticket in opened for plan in ticket.plans]

    def _await_end(self, ticket: Ticket) -> None:
        """See to it that `expire` comes upon it; it may be there already."""
        heapq.heappush(self._heap, (ticket.deadline_ns, ticket.ident))

    def _end(self, ticket: Ticket, settles_at_ns: int | None) -> None:
        self._stores.abort(ticket.plans, settles_at_ns)
        self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self.by_id[ticket.ident]
        self._count(ticket, -1, -ticket.held_bytes)

    def _count(self, ticket: Ticket, tickets: int, size_bytes: int) -> None:
        scope = ticket.request.scope
        held = self._scopes.setdefault(scope, [0, 0])
        held[0] += tickets
        held[1] += size_bytes
        assert min(held) >= 0, "a ticket was counted off twice"
        if not held[0]:
            del self._scopes[scope]
