"""The life of one queue pair on the host side, as a table (NVMe/TCP Transport 1.0, 3.1 and 3.5; Base 2.0, 3.3.2)."""

from __future__ import annotations

from enum import Enum
from typing import Final


class QueueState(Enum):
    """Where a queue pair stands."""

    NEW = "new"
    IC_SENT = "waiting for ICResp"
    CONNECTING = "waiting for Fabrics Connect"
    READY = "ready"
    CLOSED = "closed"
    FAILED = "failed"


class QueueEvent(Enum):
    """What moves a queue pair from one state to the next."""

    START = "ICReq sent"
    IC_GRANTED = "ICResp accepted"
    CONNECT_GRANTED = "Connect completed with success"
    CLOSE = "closed by this host"
    FAIL = "protocol error, deadline, TermReq, or the connection is gone"


TRANSITIONS: Final[dict[tuple[QueueState, QueueEvent], QueueState]] = {
    (QueueState.NEW, QueueEvent.START): QueueState.IC_SENT,
    (QueueState.NEW, QueueEvent.CLOSE): QueueState.CLOSED,
    (QueueState.NEW, QueueEvent.FAIL): QueueState.FAILED,
    (QueueState.IC_SENT, QueueEvent.IC_GRANTED): QueueState.CONNECTING,
    (QueueState.IC_SENT, QueueEvent.CLOSE): QueueState.CLOSED,
    (QueueState.IC_SENT, QueueEvent.FAIL): QueueState.FAILED,
    (QueueState.CONNECTING, QueueEvent.CONNECT_GRANTED): QueueState.READY,
    (QueueState.CONNECTING, QueueEvent.CLOSE): QueueState.CLOSED,
    (QueueState.CONNECTING, QueueEvent.FAIL): QueueState.FAILED,
    (QueueState.READY, QueueEvent.CLOSE): QueueState.CLOSED,
    (QueueState.READY, QueueEvent.FAIL): QueueState.FAILED,
}
OVER: Final = frozenset({QueueState.CLOSED, QueueState.FAILED})


class ImpossibleTransition(AssertionError):  # noqa: N818
    """The code that drives the queue pair is wrong; never the peer."""


def advance(state: QueueState, event: QueueEvent) -> QueueState:
    """Return the state that follows.

    Raises:
        ImpossibleTransition: the pair is not in the table.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ImpossibleTransition(f"{event.name} in state {state.name}") from None
