"""What a client hears of a request that the card does not take now, or that names what is gone."""

from __future__ import annotations

from typing import Final

from xkv_gateway.card.store import CardOffline, CardRecovering, JournalFull
from xkv_gateway.core.errors import UnknownLease, UnknownTicket
from xkv_rpc.errors import ErrorCode, RpcError

RECOVERING_RETRY_AFTER_MS: Final = 1000
BUSY_RETRY_AFTER_MS: Final = 20
"""About as long as a full set of inline loads takes on a card of ordinary speed."""
REFUSED: Final = (CardOffline, CardRecovering, JournalFull, UnknownLease, UnknownTicket)


def refusal_of(error: Exception) -> RpcError:
    """Return the answer for one of `REFUSED`."""
    match error:
        case CardOffline():
            return RpcError(ErrorCode.CARD_OFFLINE, "the card cannot be reached; try again later")
        case CardRecovering():
            message = "the run before may still write to the card; lookups and loads are served"
            return RpcError(ErrorCode.RECOVERING, message, retry_after_ms=RECOVERING_RETRY_AFTER_MS)
        case JournalFull():
            message = "the journal is being relieved by a checkpoint"
            return RpcError(ErrorCode.BUSY, message, retry_after_ms=BUSY_RETRY_AFTER_MS)
        case UnknownTicket():
            return RpcError(ErrorCode.UNKNOWN_TICKET, "no such ticket, or it has ended", field="ticket")
    message = "no such lease, or it can no longer be kept"
    return RpcError(ErrorCode.UNKNOWN_LEASE, message, field="lease")
