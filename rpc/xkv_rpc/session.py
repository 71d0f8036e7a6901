"""The bookkeeping of both sides of a connection as data: what is in flight, and whether calling makes sense. Pure.

`Ledger` bounds what the server holds for its peers. A peer has an entry only while something is in flight for it, so the
table is as long as the work is, however many peers come and go.

`Breaker` is the client's circuit breaker; its states are a table.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from xkv_rpc.errors import CircuitOpenError

if TYPE_CHECKING:
    from xkv_rpc.doors import ClientKeys
    from xkv_rpc.messages import PeerId


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """What a server holds at most before it answers `busy`, and at last drops replies."""

    peer_requests_max: int = 256
    """Unanswered requests of one peer."""
    total_requests_max: int = 8192
    """Unanswered requests of all peers."""
    payload_bytes_max: int = 512 << 20
    """Inline payload bytes of unanswered requests, all peers."""
    partial_bytes_max: int = 512 << 20
    """Bytes of messages that have not come whole, all peers without keys."""
    peer_reply_bytes_busy: int = 64 << 20
    """Reply bytes that a peer has not taken yet: from here on its new requests are `busy`."""
    peer_reply_bytes_max: int = 256 << 20
    """... and a reply that would lead beyond this is dropped and counted."""
    total_reply_bytes_max: int = 1 << 30
    """Reply bytes that all peers have not taken yet; beyond, replies with payload are dropped and counted."""
    busy_retry_after_ms: int = 20
    """What a `busy` recommends to wait."""


@dataclass(slots=True)
class PeerAccount:
    """What is in flight for one peer."""

    requests: int = 0
    reply_bytes: int = 0

    @property
    def idle(self) -> bool:
        """Whether the entry can go."""
        return self.requests == 0 and self.reply_bytes == 0


class Ledger:
    """In-flight requests and bytes, by peer and in total."""

    def __init__(self, bounds: ServerBounds) -> None:
        self.bounds = bounds
        self._peers: dict[PeerId, PeerAccount] = {}
        self.requests = 0
        self.payload_bytes = 0
        self.reply_bytes = 0

    def __len__(self) -> int:
        """Peers for which something is in flight."""
        return len(self._peers)

    def admit(self, peer: PeerId, payload_bytes: int) -> bool:
        """Count a new request in, or say that its answer is `busy`."""
        bounds = self.bounds
        account = self._peers.get(peer)
        if account is not None and (
            account.requests >= bounds.peer_requests_max
            or account.reply_bytes >= bounds.peer_reply_bytes_busy
        ):
            return False
        if self.requests >= bounds.total_requests_max:
            return False
        if payload_bytes and self.payload_bytes + payload_bytes > bounds.payload_bytes_max:
            return False
        if account is None:
            account = self._peers[peer] = PeerAccount()
        account.requests += 1
        self.requests += 1
        self.payload_bytes += payload_bytes
        return True

    def answered(self, peer: PeerId, payload_bytes: int) -> None:
        """Count an admitted request out."""
        account = self._peers[peer]
        assert account.requests > 0
        account.requests -= 1
        self.requests -= 1
        self.payload_bytes -= payload_bytes
        if account.idle:
            del self._peers[peer]

    def owe(self, peer: PeerId, reply_bytes: int) -> bool:
        """Count reply bytes that the peer has yet to take, or say that they must be dropped."""
        account = self._peers.get(peer)
        held = 0 if account is None else account.reply_bytes
        if held + reply_bytes > self.bounds.peer_reply_bytes_max:
            return False
        if self.reply_bytes + reply_bytes > self.bounds.total_reply_bytes_max:
            return False
        if account is None:
            account = self._peers[peer] = PeerAccount()
        account.reply_bytes += reply_bytes
        self.reply_bytes += reply_bytes
        return True

    def settle(self, peer: PeerId, reply_bytes: int) -> None:
        """Count reply bytes out: they were taken by the peer's connection, or dropped."""
        account = self._peers[peer]
        assert account.reply_bytes >= reply_bytes
        account.reply_bytes -= reply_bytes
        self.reply_bytes -= reply_bytes
        if account.idle:
            del self._peers[peer]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """How patient a client is, and how much it holds."""

    timeout_ms: int = 1000
    """Deadline of a call that names none."""
    connect_timeout_ms: int = 250
    """How much of its deadline a call waits for a connection."""
    probe_timeout_ms: int = 100
    """Deadline of the ping that finds out whether an unavailable gateway is back."""
    backoff_min_ms: int = 100
    backoff_max_ms: int = 5000
    """The wait between probes: it doubles from the least to the most."""
    connections_max: int = 8
    """Blocking client: connections, so also calls of different threads at once; further ones wait."""
    calls_max: int = 256
    """Asyncio client: calls in flight at once; further ones wait."""
    keys: ClientKeys | None = None
    """For a CURVE endpoint: whom to trust, and who the client is (`curve_files.read_client_keys`)."""


# --- circuit breaker --------------------------------------------------------------------------------------


class BreakerState(Enum):
    """Whether calls go through."""

    CLOSED = "closed"
    """They do."""
    OPEN = "open"
    """They fail at once, until the next probe is due."""
    PROBING = "probing"
    """One caller tries; the others fail at once."""


class BreakerEvent(Enum):
    """What happened."""

    SUCCESS = "success"
    FAILURE = "failure"
    PROBE = "probe"


BREAKER_TRANSITIONS: Final[dict[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    (BreakerState.CLOSED, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.CLOSED, BreakerEvent.FAILURE): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.PROBE): BreakerState.PROBING,
    # Calls that were under way when another one failed end late; a success among them proves the gateway alive.
    (BreakerState.OPEN, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.OPEN, BreakerEvent.FAILURE): BreakerState.OPEN,
    (BreakerState.PROBING, BreakerEvent.SUCCESS): BreakerState.CLOSED,
    (BreakerState.PROBING, BreakerEvent.FAILURE): BreakerState.OPEN,
}


class Breaker:
    """Makes a dead gateway cost its callers microseconds (R10). Times are monotonic nanoseconds."""

    def __init__(self, *, backoff_min_ns: int, backoff_max_ns: int) -> None:
        assert 0 < backoff_min_ns <= backoff_max_ns
        self._backoff_min_ns = backoff_min_ns
        self._backoff_max_ns = backoff_max_ns
        self._backoff_ns = backoff_min_ns
        self._probe_at_ns = 0
        self.state = BreakerState.CLOSED

    def _step(self, event: BreakerEvent) -> None:
        self.state = BREAKER_TRANSITIONS[self.state, event]

    def admit(self, now_ns: int) -> bool:
        """Ask before a call. True: the caller must probe first and report the outcome of that.

        Raises:
            CircuitOpenError: The call fails now.
        """
        if self.state is BreakerState.CLOSED:
            return False
        if self.state is BreakerState.PROBING or now_ns < self._probe_at_ns:
            raise CircuitOpenError(max(self._probe_at_ns - now_ns, 0))
        self._step(BreakerEvent.PROBE)
        return True

    def succeeded(self) -> None:
        """Report that the gateway answered, whatever it said."""
        self._step(BreakerEvent.SUCCESS)
        self._backoff_ns = self._backoff_min_ns

    def failed(self, now_ns: int) -> None:
        """Report that it did not. Each failed probe doubles the wait for the next one, up to the maximum."""
        if self.state is BreakerState.OPEN:
            self._step(BreakerEvent.FAILURE)
            return
        if self.state is BreakerState.PROBING:
            self._backoff_ns = min(2 * self._backoff_ns, self._backoff_max_ns)
        self._step(BreakerEvent.FAILURE)
        self._probe_at_ns = now_ns + self._backoff_ns
