"""An authentication transaction on both sides, as tables (Base 2.0, 8.13.2 and 8.13.5.2)."""

from __future__ import annotations

from enum import Enum
from typing import Final


class HostState(Enum):
    """Where the host stands."""

    NEW = "not begun"
    NEGOTIATED = "waiting for the Challenge"
    REPLIED = "waiting for Success1"
    DONE = "authenticated"
    FAILED = "failed"


class HostEvent(Enum):
    """What moves the host on."""

    NEGOTIATE = "AUTH_Negotiate sent"
    CHALLENGE = "Challenge answered"
    SUCCESS = "Success1 accepted"
    FAILURE = "a message refused, or the controller refuses"


HOST_TABLE: Final[dict[tuple[HostState, HostEvent], HostState]] = {
    (HostState.NEW, HostEvent.NEGOTIATE): HostState.NEGOTIATED,
    (HostState.NEGOTIATED, HostEvent.CHALLENGE): HostState.REPLIED,
    (HostState.NEGOTIATED, HostEvent.FAILURE): HostState.FAILED,
    (HostState.REPLIED, HostEvent.SUCCESS): HostState.DONE,
    (HostState.REPLIED, HostEvent.FAILURE): HostState.FAILED,
}


class ControllerState(Enum):
    """Where the controller stands: the message that comes next, and whose it is."""

    NEGOTIATE = "waiting for AUTH_Negotiate"
    CHALLENGE = "to send the Challenge"
    REPLY = "waiting for the Reply"
    SUCCESS1 = "to send Success1"
    SUCCESS2 = "waiting for Success2"
    FAILURE1 = "to send AUTH_Failure1"
    DONE = "authenticated"
    FAILED = "failed"


class ControllerEvent(Enum):
    """What moves the controller on."""

    NEGOTIATED = "AUTH_Negotiate accepted"
    CHALLENGED = "Challenge sent"
    PROVED = "the response of the Reply is right"
    ACCEPTED = "Success1 sent; the host has asked for no proof"
    ANSWERED = "Success1 sent with the proof that the host asked for"
    CONFIRMED = "Success2"
    REFUSED = "a message refused"
    TOLD = "AUTH_Failure1 sent"
    GIVEN_UP = "AUTH_Failure2"


_S = ControllerState
_E = ControllerEvent
CONTROLLER_TABLE: Final[dict[tuple[ControllerState, ControllerEvent], ControllerState]] = {
    (_S.NEGOTIATE, _E.NEGOTIATED): _S.CHALLENGE,
    (_S.CHALLENGE, _E.CHALLENGED): _S.REPLY,
    (_S.REPLY, _E.PROVED): _S.SUCCESS1,
    (_S.SUCCESS1, _E.ACCEPTED): _S.DONE,
    (_S.SUCCESS1, _E.ANSWERED): _S.SUCCESS2,
    (_S.SUCCESS2, _E.CONFIRMED): _S.DONE,
    (_S.SUCCESS2, _E.GIVEN_UP): _S.FAILED,
    (_S.FAILURE1, _E.TOLD): _S.FAILED,
    **{
        (state, _E.REFUSED): _S.FAILURE1
        for state in (_S.NEGOTIATE, _S.CHALLENGE, _S.REPLY, _S.SUCCESS1, _S.SUCCESS2, _S.FAILURE1)
    },
}
