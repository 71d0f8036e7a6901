"""What the scheduler's side knows of one request. Pure.

The states of the external load are a table; an event that a state does not have is a bug and raises. A request whose load
failed is barred: it is never offered a hit again, so that a card that cannot be read costs it one detour and no loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final


class State(Enum):
    """Where a request stands with its load."""

    # By identity: an enum's own hash is that of its name, a call in Python for each look into the table.
    __hash__ = object.__hash__

    FRESH = "fresh"
    """Nothing found, or nothing asked yet."""
    OFFERED = "offered"
    """The engine was told of a hit, and a lease holds it."""
    LOADING = "loading"
    LOADED = "loaded"
    """The bytes came; should the engine lose them (preemption), it may ask again."""
    BARRED = "barred"
    """The load failed."""
    LEAVING = "leaving"
    """The request ended while it was loading: its blocks are free when every rank has said that it is done."""
    GONE = "gone"


class Event(Enum):
    """What happens to it."""

    __hash__ = object.__hash__

    OFFER = "offer"
    MISS = "miss"
    ALLOCATE = "allocate"
    """The engine takes the offer and has made room."""
    DECLINE = "decline"
    """The engine goes on without."""
    SUCCEED = "succeed"
    FAIL = "fail"
    FINISH = "finish"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.FRESH, Event.OFFER): State.OFFERED,
    (State.FRESH, Event.MISS): State.FRESH,
    (State.FRESH, Event.DECLINE): State.FRESH,
    (State.FRESH, Event.FINISH): State.GONE,
    (State.OFFERED, Event.OFFER): State.OFFERED,
    (State.OFFERED, Event.MISS): State.FRESH,
    (State.OFFERED, Event.ALLOCATE): State.LOADING,
    (State.OFFERED, Event.DECLINE): State.FRESH,
    (State.OFFERED, Event.FINISH): State.GONE,
    (State.LOADING, Event.SUCCEED): State.LOADED,
    (State.LOADING, Event.FAIL): State.BARRED,
    (State.LOADING, Event.FINISH): State.LEAVING,
    # The engine allocates a second time when an asynchronous load is done; nothing external is meant by that.
    (State.LOADING, Event.DECLINE): State.LOADING,
    (State.LOADED, Event.OFFER): State.OFFERED,
    (State.LOADED, Event.MISS): State.LOADED,
    (State.LOADED, Event.DECLINE): State.LOADED,
    (State.LOADED, Event.FINISH): State.GONE,
    (State.BARRED, Event.MISS): State.BARRED,
    (State.BARRED, Event.DECLINE): State.BARRED,
    (State.BARRED, Event.FINISH): State.GONE,
    (State.LEAVING, Event.SUCCEED): State.GONE,
    (State.LEAVING, Event.FAIL): State.GONE,
}


@dataclass(slots=True)
class Tracked:
    """One request.

    Attributes:
        scope: The tenant's scope at the gateway.
        state: Of its load.
        offered_tokens: What the engine had itself when the hit was offered; the load begins there.
        leases: Of the hit that is offered or loading: for each, the chunk after the last that it covers.
        stored_chunks: Chunks that were handed to be stored, or need not be.
        next_store_tokens: From how many computed tokens on there is another chunk to look at.
        ranks_pending: Ranks that have not told the end of the load.
        load_failed: Whether one of them failed.
    """

    scope: bytes
    state: State = State.FRESH
    offered_tokens: int = 0
    leases: list[tuple[int, bytes]] = field(default_factory=list)
    stored_chunks: int = 0
    next_store_tokens: int = 0
    ranks_pending: int = 0
    load_failed: bool = False

    def step(self, event: Event) -> None:
        """Take an event.

        Raises:
            KeyError: The state does not have it.
        """
        self.state = TRANSITIONS[self.state, event]

    def rank_done(self, count: int, *, failed: bool) -> bool:
        """Count ranks whose part of the load has ended; True: that was the last one, and the state has moved."""
        self.ranks_pending -= count
        self.load_failed |= failed
        if self.ranks_pending > 0:
            return False
        self.step(Event.FAIL if self.load_failed else Event.SUCCEED)
        return True
