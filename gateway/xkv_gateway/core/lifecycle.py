"""The states of an object and what moves it between them: the whole automaton, as one table.

    ABSENT --reserve--> RESERVED --commit--> COMMITTING --persist--> LIVE
    RESERVED --abort--> ABSENT                 the writer's I/O ended: nothing can land any more
    RESERVED --fail | cancel--> QUARANTINED    a write may still land: settled later
    COMMITTING | LIVE --doom--> DOOMED         deleted, evicted, wiped or found corrupt
    DOOMED --free--> ABSENT                    no lease, no pin, tombstone durable (R3)
    DOOMED --hold--> QUARANTINED               as `free`, but the units are not trusted yet
    QUARANTINED --settle--> ABSENT

A pair that the table does not list raises: there is no default.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np

from .errors import IllegalTransition

if TYPE_CHECKING:
    from .arrays import U8


class State(IntEnum):
    """Where an object stands."""

    ABSENT = 0
    RESERVED = 1
    COMMITTING = 2
    LIVE = 3
    DOOMED = 4
    QUARANTINED = 5


ABSENT: Final = 0
RESERVED: Final = 1
COMMITTING: Final = 2
LIVE: Final = 3
DOOMED: Final = 4
QUARANTINED: Final = 5
"""The states as plain numbers, to compare arrays with: numpy takes microseconds to make sense of a member of an enum."""
assert tuple(State) == (ABSENT, RESERVED, COMMITTING, LIVE, DOOMED, QUARANTINED)


class Event(IntEnum):
    """What happens to an object."""

    RESERVE = 0
    COMMIT = 1
    ABORT = 2
    FAIL = 3
    CANCEL = 4
    PERSIST = 5
    DOOM = 6
    FREE = 7
    HOLD = 8
    SETTLE = 9


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.ABSENT, Event.RESERVE): State.RESERVED,
    (State.RESERVED, Event.COMMIT): State.COMMITTING,
    (State.RESERVED, Event.ABORT): State.ABSENT,
    (State.RESERVED, Event.FAIL): State.QUARANTINED,
    (State.RESERVED, Event.CANCEL): State.QUARANTINED,
    (State.COMMITTING, Event.PERSIST): State.LIVE,
    (State.COMMITTING, Event.DOOM): State.DOOMED,
    (State.LIVE, Event.DOOM): State.DOOMED,
    (State.DOOMED, Event.FREE): State.ABSENT,
    (State.DOOMED, Event.HOLD): State.QUARANTINED,
    (State.QUARANTINED, Event.SETTLE): State.ABSENT,
}

_ILLEGAL: Final = 255


def _compiled() -> U8:
    table = np.full((len(State), len(Event)), _ILLEGAL, np.uint8)
    for (state, event), after in TRANSITIONS.items():
        table[state, event] = after
    table.setflags(write=False)
    return table


_TABLE: Final = _compiled()


_BY_NUMBER: Final = {(int(state), int(event)): int(after) for (state, event), after in TRANSITIONS.items()}


def next_state(state: int, event: Event) -> int:
    """The state after `event`.

    Raises:
        IllegalTransition: the pair is not in the table.
    """
    after = _BY_NUMBER.get((state, event))
    if after is None:
        pair = f"{State(state).name} and {event.name}"
        raise IllegalTransition(pair)
    return after


def next_states(states: U8, event: Event) -> U8:
    """The states after `event`, for a whole batch.

    Raises:
        IllegalTransition: a pair is not in the table; nothing has been changed.
    """
    after: U8 = _TABLE[states, event]
    if after.size and after.max() == _ILLEGAL:
        pair = f"{State(int(states[int(after.argmax())])).name} and {event.name}"
        raise IllegalTransition(pair)
    return after
