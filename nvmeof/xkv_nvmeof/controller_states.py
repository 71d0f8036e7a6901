"""State tables of the controller side. A pair that is not in a table is a mistake of ours and raises."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class ConnectionState(Enum):
    """One TCP connection (TCP 3.1, 3.4)."""

    WAIT_ICREQ = auto()
    WAIT_CONNECT = auto()
    LIVE = auto()
    ENDING = auto()
    """Nothing is processed any more; what is queued is sent, then the connection is closed."""
    CLOSED = auto()


class ConnectionEvent(Enum):
    """What happens to a connection."""

    INITIALIZED = auto()
    CONNECTED = auto()
    VIOLATED = auto()
    END = auto()
    LOST = auto()


_C = ConnectionState
_CE = ConnectionEvent
CONNECTION_TABLE: Final[dict[tuple[ConnectionState, ConnectionEvent], ConnectionState]] = {
    (_C.WAIT_ICREQ, _CE.INITIALIZED): _C.WAIT_CONNECT,
    (_C.WAIT_ICREQ, _CE.VIOLATED): _C.ENDING,
    (_C.WAIT_ICREQ, _CE.END): _C.ENDING,
    (_C.WAIT_ICREQ, _CE.LOST): _C.CLOSED,
    (_C.WAIT_CONNECT, _CE.CONNECTED): _C.LIVE,
    (_C.WAIT_CONNECT, _CE.VIOLATED): _C.ENDING,
    (_C.WAIT_CONNECT, _CE.END): _C.ENDING,
    (_C.WAIT_CONNECT, _CE.LOST): _C.CLOSED,
    (_C.LIVE, _CE.VIOLATED): _C.ENDING,
    (_C.LIVE, _CE.END): _C.ENDING,
    (_C.LIVE, _CE.LOST): _C.CLOSED,
    (_C.ENDING, _CE.END): _C.ENDING,
    (_C.ENDING, _CE.LOST): _C.CLOSED,
    (_C.CLOSED, _CE.END): _C.CLOSED,
    (_C.CLOSED, _CE.LOST): _C.CLOSED,
}


class ControllerPhase(Enum):
    """The controller as CC and CSTS show it (Base 3.5)."""

    DISABLED = auto()
    READY = auto()
    SHUTTING_DOWN = auto()
    SHUT_DOWN = auto()
    FAILED = auto()
    """CSTS.CFS: a configuration that is not supported; a reset (CC.EN = 0) leaves it."""
    GONE = auto()
    """The association ended."""


class ControllerEvent(Enum):
    """What changes the phase."""

    ENABLE = auto()
    ENABLE_BAD = auto()
    DISABLE = auto()
    SHUTDOWN = auto()
    SHUTDOWN_DONE = auto()
    ASSOCIATION_END = auto()


_P = ControllerPhase
_PE = ControllerEvent
CONTROLLER_TABLE: Final[dict[tuple[ControllerPhase, ControllerEvent], ControllerPhase]] = {
    (_P.DISABLED, _PE.ENABLE): _P.READY,
    (_P.DISABLED, _PE.ENABLE_BAD): _P.FAILED,
    (_P.DISABLED, _PE.DISABLE): _P.DISABLED,
    (_P.DISABLED, _PE.SHUTDOWN): _P.SHUTTING_DOWN,
    (_P.READY, _PE.DISABLE): _P.DISABLED,
    (_P.READY, _PE.SHUTDOWN): _P.SHUTTING_DOWN,
    (_P.SHUTTING_DOWN, _PE.SHUTDOWN): _P.SHUTTING_DOWN,
    (_P.SHUTTING_DOWN, _PE.SHUTDOWN_DONE): _P.SHUT_DOWN,
    (_P.SHUTTING_DOWN, _PE.DISABLE): _P.DISABLED,
    (_P.SHUT_DOWN, _PE.SHUTDOWN): _P.SHUT_DOWN,
    (_P.SHUT_DOWN, _PE.DISABLE): _P.DISABLED,
    (_P.FAILED, _PE.DISABLE): _P.DISABLED,
    (_P.FAILED, _PE.SHUTDOWN): _P.SHUTTING_DOWN,
    (_P.DISABLED, _PE.SHUTDOWN_DONE): _P.DISABLED,
    (_P.READY, _PE.SHUTDOWN_DONE): _P.READY,
    (_P.GONE, _PE.SHUTDOWN_DONE): _P.GONE,
    **{(phase, _PE.ASSOCIATION_END): _P.GONE for phase in ControllerPhase},
}
