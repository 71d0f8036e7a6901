"""The books of the server and the circuit breaker of the client."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_rpc.errors import CircuitOpenError
from xkv_rpc.messages import PeerId
from xkv_rpc.session import (
    BREAKER_TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerState,
    Ledger,
    ServerBounds,
)

MS = 1_000_000
BOUNDS = ServerBounds(
    peer_requests_max=3,
    total_requests_max=5,
    payload_bytes_max=100,
    peer_reply_bytes_busy=50,
    peer_reply_bytes_max=80,
    total_reply_bytes_max=120,
)
STEPS = st.tuples(
    st.sampled_from(["admit", "answered", "owe", "settle"]), st.integers(0, 3), st.integers(0, 60)
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(STEPS, max_size=60))
def test_the_ledger_never_exceeds_a_bound_and_forgets_who_is_done(steps: list[tuple[str, int, int]]) -> None:
    books = Books()
    for step, number, size in steps:
        books.apply(step, PeerId(bytes([number])), size)
        books.check()
    books.settle_all()
    assert (books.ledger.requests, books.ledger.payload_bytes, books.ledger.reply_bytes) == (0, 0, 0)
    assert len(books.ledger) == 0


class Books:
    """A ledger beside a plain list of everything that is in it."""

    def __init__(self) -> None:
        self.ledger = Ledger(BOUNDS)
        self.requests: list[tuple[PeerId, int]] = []
        self.replies: list[tuple[PeerId, int]] = []

    def apply(self, step: str, peer: PeerId, size: int) -> None:
        if step == "admit" and self.ledger.admit(peer, size):
            self.requests.append((peer, size))
        elif step == "answered" and self.requests:
            self.ledger.answered(*self.requests.pop())
        elif step == "owe" and self.ledger.owe(peer, size + 1):
            self.replies.append((peer, size + 1))
        elif step == "settle" and self.replies:
            self.ledger.settle(*self.replies.pop())

    def check(self) -> None:
        assert self.ledger.requests == len(self.requests) <= 5
        assert self.ledger.payload_bytes == sum(size for _, size in self.requests) <= 100
        assert self.ledger.reply_bytes == sum(size for _, size in self.replies) <= 120
        peers = {peer for peer, _ in self.requests + self.replies}
        assert len(self.ledger) == len(peers)
        for peer in peers:
            assert sum(who == peer for who, _ in self.requests) <= 3
            assert sum(size for who, size in self.replies if who == peer) <= 80

    def settle_all(self) -> None:
        for request in self.requests:
            self.ledger.answered(*request)
        for reply in self.replies:
            self.ledger.settle(*reply)


def test_a_peer_that_owes_too_much_is_busy_and_others_are_not() -> None:
    ledger = Ledger(BOUNDS)
    slow, other = PeerId(b"slow"), PeerId(b"other")
    assert ledger.owe(slow, 50)
    assert not ledger.admit(slow, 0)
    assert ledger.admit(other, 0)
    ledger.settle(slow, 50)
    assert ledger.admit(slow, 0)


def test_an_unknown_pair_of_state_and_event_raises() -> None:
    pairs = set(itertools.product(BreakerState, BreakerEvent)) - set(BREAKER_TRANSITIONS)
    assert pairs == {(BreakerState.CLOSED, BreakerEvent.PROBE), (BreakerState.PROBING, BreakerEvent.PROBE)}
    for state, event in pairs:
        breaker = Breaker(backoff_min_ns=1, backoff_max_ns=1)
        breaker.state = state
        with pytest.raises(KeyError):
            breaker._step(event)


def test_the_breaker_opens_probes_with_backoff_and_closes() -> None:
    breaker = Breaker(backoff_min_ns=100 * MS, backoff_max_ns=300 * MS)
    assert breaker.admit(0) is False
    breaker.failed(0)
    now = 0
    for wait_ms in (100, 200, 300, 300):
        with pytest.raises(CircuitOpenError) as caught:
            breaker.admit(now + wait_ms * MS - 1)
        assert caught.value.retry_after_ns == 1
        now += wait_ms * MS
        assert breaker.admit(now) is True
        with pytest.raises(CircuitOpenError):
            breaker.admit(now)
        breaker.failed(now)
    now += 300 * MS
    assert breaker.admit(now) is True
    breaker.succeeded()
    assert breaker.admit(now) is False
    breaker.failed(now)
    with pytest.raises(CircuitOpenError) as caught:
        breaker.admit(now)
    assert caught.value.retry_after_ns == 100 * MS


def test_late_outcomes_of_other_calls_do_not_disturb_the_backoff() -> None:
    breaker = Breaker(backoff_min_ns=100 * MS, backoff_max_ns=300 * MS)
    breaker.failed(0)
    breaker.failed(50 * MS)
    assert breaker.admit(100 * MS) is True
    breaker.failed(100 * MS)
    breaker.succeeded()
    assert breaker.admit(100 * MS) is False
