"""The feature `direct` of the control protocol: clients that read and write the card themselves.

It gives a client the whole namespace, so it is off unless the operator has said otherwise, and never opened by a key: a key
is granted namespaces, and a card has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from xkv_gateway.card.direct import Commit, Reserve, TooManyBytes, TooManyTickets, WrongCount
from xkv_gateway.card.store import CardOffline
from xkv_gateway.core.types import BeginStore, Lookup, LookupOutcome, TicketId
from xkv_gateway.service.order import Footprint
from xkv_rpc import messages as m
from xkv_rpc.errors import ErrorCode, RpcError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from xkv_gateway.card.direct import Direct
    from xkv_gateway.core.types import LookupMode
    from xkv_rpc.calls import Call

FEATURE: Final = "direct"
NS_PER_MS: Final = 1_000_000
BUSY_RETRY_AFTER_MS: Final = 1000
"""Tickets live for seconds."""


class DirectService:
    """The operations.

    Args:
        direct: reservations and commits on the card.
        target: where clients find the card now; None: they cannot.
        grace_ms: told in `hello`.
        store_wait_ns: how long a reservation waits for room.
    """

    def __init__(
        self, direct: Direct, target: Callable[[], m.TargetInfo | None], *, grace_ms: int, store_wait_ns: int
    ) -> None:
        self._direct = direct
        self._store = direct.store
        self._target = target
        self._grace_ms = grace_ms
        self._store_wait_ns = store_wait_ns

    def hello(self, reply: m.HelloReply) -> m.HelloReply:
        """Return the reply to a `hello` of somebody for whom it is offered."""
        return replace(
            reply,
            features=[*reply.features, FEATURE],
            target=self._target(),
            direct_grace_ms=self._grace_ms,
        )

    def footprint(self, request: m.Commit) -> Footprint | None:
        """Return what a commit touches: what comes behind it on its connection sees its effect."""
        ticket = self._store.engine.tickets.by_id.get(TicketId(request.ticket))
        if ticket is None:
            return None
        begun = ticket.request
        return Footprint(begun.namespace, begun.scope, begun.keys, writes=True)

    def lookup(self, call: Call, request: m.Lookup, mode: LookupMode) -> int:
        """Answer a lookup with extents; returns the hits. Before the card is ours for certain, nothing of it is handed out: all is a miss."""
        store = self._store
        if store.writable:
            ttl_ns = request.lease_ms * NS_PER_MS
            outcome = store.lookup(Lookup(request.ns, request.scope, request.keys, mode, ttl_ns))
        else:
            each = request.mode is m.LookupMode.EACH
            outcome = LookupOutcome(0, [None] * len(request.keys) if each else [], None, 0)
        reply = m.LookupReply(
            outcome.hits, outcome.sizes_bytes, outcome.lease, outcome.lease_ttl_ns // NS_PER_MS
        )
        if outcome.lease is not None:
            extents, checksums = self._direct.leased(outcome.lease)
            reply = replace(reply, extents=extents, checksums=checksums)
            store.arm_timer()
        elif not outcome.hits:
            reply = replace(reply, extents=[], checksums=[])
        call.reply(reply)
        return outcome.hits

    def start(
        self, call: Call, request: m.Reserve | m.Commit | m.Abort
    ) -> tuple[Reserve | Commit, Coroutine[None, None, None]] | None:
        """Admit a request; returns what is left to be done, None if it is answered.

        Raises:
            RpcError, CardOffline, CardRecovering, UnknownTicket.
        """
        match request:
            case m.Reserve():
                reserve = self._reserve(request)
                return reserve, self._finish_reserve(call, reserve)
            case m.Commit():
                commit = self._commit(request)
                return commit, self._finish_commit(call, commit)
            case m.Abort():
                self._direct.abort(TicketId(request.ticket), settled=request.settled)
                call.reply(m.AbortReply())
                return None

    def _reserve(self, request: m.Reserve) -> Reserve:
        keys = BeginStore(request.ns, request.scope, request.keys, request.sizes)
        deadline_ns = self._store.clock() + self._store_wait_ns
        try:
            return Reserve(self._direct, keys, request.ttl_ms * NS_PER_MS, deadline_ns)
        except TooManyTickets:
            raise _too_many() from None
        except TooManyBytes:
            message = "more than a scope may have reserved: ask for fewer keys"
            raise RpcError(ErrorCode.TOO_LARGE, message, field="sizes") from None

    @staticmethod
    async def _finish_reserve(call: Call, reserve: Reserve) -> None:
        try:
            reserved = await reserve.reserve()
        except TooManyTickets:
            call.fail(_too_many())
            return
        results = [
            m.StoreStatus.RESERVED.value if status is None else status.value for status in reserved.statuses
        ]
        call.reply(m.ReserveReply(results, reserved.ticket, reserved.extents))

    def _commit(self, request: m.Commit) -> Commit:
        try:
            return Commit(self._direct, TicketId(request.ticket), request.checksums)
        except WrongCount:
            raise RpcError(
                ErrorCode.BAD_REQUEST, "not one checksum for each reserved key", field="checksums"
            ) from None

    async def _finish_commit(self, call: Call, commit: Commit) -> None:
        try:
            statuses = await self._direct.commit(commit)
        except CardOffline:
            message = "the card cannot be reached; nothing was committed, try again while the ticket lasts"
            call.fail(RpcError(ErrorCode.CARD_OFFLINE, message))
            return
        call.reply(m.CommitReply([status.value for status in statuses]))


def _too_many() -> RpcError:
    return RpcError(
        ErrorCode.BUSY,
        "the scope has as many tickets, or reserved bytes, as it may",
        retry_after_ms=BUSY_RETRY_AFTER_MS,
    )
