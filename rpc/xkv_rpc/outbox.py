"""What the server still has to send: nothing blocks, every peer's share is bounded, and what is dropped is counted.

A reply goes straight to the socket. Where the peer's queue there is full it waits here, counted by bytes, and is tried
again soon; where the peer is gone it is dropped. Replies with many payload bytes stay counted until the transport is done
with them, wherever they wait.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from xkv_rpc.transport import SendOutcome

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from xkv_rpc.calls import Buffer, Tracking
    from xkv_rpc.endpoints import Endpoints
    from xkv_rpc.messages import PeerId
    from xkv_rpc.session import Ledger

RETRY_MIN_S: Final = 0.001
RETRY_MAX_S: Final = 0.05
"""The wait between two looks at what is outstanding: it doubles while nothing moves."""
WAITING_ENTRY_BYTES: Final = 256
"""What keeping a reply costs beside its own bytes."""
PEERS_PER_TURN: Final = 256
"""Peers looked at in one turn of the loop."""


class Outbox:
    """Sends replies, and keeps what cannot be sent yet."""

    def __init__(
        self,
        endpoints: Endpoints,
        ledger: Ledger,
        loop: asyncio.AbstractEventLoop,
        *,
        after_send: Callable[[], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._endpoints = endpoints
        self._ledger = ledger
        self._loop = loop
        self._after_send = after_send
        self._on_empty = on_empty
        self._waiting: dict[PeerId, deque[tuple[bytes, Sequence[Buffer], int]]] = {}
        self._tracked: dict[PeerId, deque[tuple[Tracking, int]]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._retry_s = RETRY_MIN_S
        self.sent_replies = 0
        self.sent_bytes = 0
        self.dropped_gone = 0
        """Replies whose peer was gone."""
        self.dropped_full = 0
        """Replies of peers that do not read."""

    @property
    def waiting(self) -> bool:
        """Whether replies wait here for their peer."""
        return bool(self._waiting)

    def send(self, peer: PeerId, header: bytes, payloads: Sequence[Buffer]) -> bool:
        """Send a reply, now or as soon as its peer takes it.

        False: its peer has not taken what it was sent before. A reply with payloads can then be tried again as a small
        one that says so; a small one has been dropped and counted.
        """
        size = len(header) + (sum(map(len, payloads)) if payloads else 0)
        if peer not in self._waiting:
            if payloads and not self._ledger.owe(peer, size):
                return False
            outcome = self._try(peer, header, payloads, size, owed_bytes=size if payloads else 0)
            if outcome is not SendOutcome.FULL:
                return True
            if payloads:
                self._ledger.settle(peer, size)
        if not self._ledger.owe(peer, size + WAITING_ENTRY_BYTES):
            self.dropped_full += not payloads
            return False
        self._waiting.setdefault(peer, deque()).append((header, payloads, size))
        self._arm()
        return True

    def _try(
        self, peer: PeerId, header: bytes, payloads: Sequence[Buffer], size: int, *, owed_bytes: int
    ) -> SendOutcome:
        """Hand a reply to the socket. Of its `owed_bytes`, counted before, settle those that are not held any more."""
        outcome, tracker = self._endpoints.send(peer, header, payloads)
        self._after_send()
        if outcome is SendOutcome.FULL:
            return outcome
        if outcome is SendOutcome.SENT:
            self.sent_replies += 1
            self.sent_bytes += size
        else:
            self.dropped_gone += 1
        if tracker is not None:
            self._tracked.setdefault(peer, deque()).append((tracker, owed_bytes))
            self._arm()
        elif owed_bytes:
            self._ledger.settle(peer, owed_bytes)
        return outcome

    def reap(self, peer: PeerId) -> bool:
        """Count out what the peer's connection has taken. True if anything moved."""
        tracked = self._tracked.get(peer)
        if tracked is None:
            return False
        moved = False
        while tracked and tracked[0][0].done:
            self._ledger.settle(peer, tracked.popleft()[1])
            moved = True
        if not tracked:
            del self._tracked[peer]
        return moved

    def flush(self, peer: PeerId) -> bool:
        """Send what waits for the peer as far as it goes. True if anything moved."""
        waiting = self._waiting.get(peer)
        if waiting is None:
            return False
        moved = False
        while waiting:
            header, payloads, size = waiting[0]
            owed = size + WAITING_ENTRY_BYTES
            if self._try(peer, header, payloads, size, owed_bytes=owed) is SendOutcome.FULL:
                return moved
            waiting.popleft()
            moved = True
        del self._waiting[peer]
        if not self._waiting:
            self._on_empty()
        return moved

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(self._retry_s, self._retry)

    def _retry(self) -> None:
        self._timer = None
        moved = False
        for table, visit in ((self._tracked, self.reap), (self._waiting, self.flush)):
            for peer in list(table)[:PEERS_PER_TURN]:
                if visit(peer):
                    moved = True
                elif len(table) > PEERS_PER_TURN:
                    # To the end of the line, so that those who do not move cannot hide the others.
                    table[peer] = table.pop(peer)  # type: ignore[assignment]
        self._retry_s = RETRY_MIN_S if moved else min(2 * self._retry_s, RETRY_MAX_S)
        if self._tracked or self._waiting:
            self._arm()

    def close(self) -> None:
        """Forget what is left, counted as dropped."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.dropped_full += sum(map(len, self._waiting.values()))
        self._waiting.clear()
        self._tracked.clear()
