"""The end of tickets: in the middle of a commit, of many at once, and of those of a run before."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.core.helpers import SECOND_NS, World
from tests.core.test_tickets import GRACE_NS, TTL_NS, after_crash, free, granted, units, world
from xkv_gateway.core.types import StoreStatus, WritePlan

if TYPE_CHECKING:
    import pytest


def test_a_commit_that_comes_to_nothing_behind_the_end_of_its_ticket_ends_it() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    mine = units(ticket)
    w.engine.tickets.close(ticket)
    w.wait(TTL_NS + SECOND_NS)
    assert w.begin([b"a"]) == [StoreStatus.IN_PROGRESS], "its commit may yet come out well"
    w.engine.tickets.reopen(ticket)
    assert isinstance(w.begin([b"a"])[0], WritePlan), "it is over, and its key is nobody's"
    assert not w.engine.tickets.by_id
    w.wait(GRACE_NS - SECOND_NS - 1)
    assert not mine & free(w)
    w.wait(1)
    assert mine <= free(w), "the grace counts from the end of the ticket"


def test_a_commit_that_ends_behind_the_end_of_its_ticket_leaves_nothing_behind() -> None:
    w = world()
    ticket = granted(w, [b"a"])
    w.engine.tickets.close(ticket)
    w.wait(TTL_NS + SECOND_NS)
    outcome = w.engine.commit_store(ticket.plans, [1], w.now_ns)
    w.engine.tickets.done(ticket, outcome.statuses)
    assert outcome.statuses == [StoreStatus.STORED]
    w.engine.tick(w.now_ns)
    assert not w.engine.tickets.by_id
    w.persist()
    assert w.held([b"a"]) == [True]


def freed_by_each_tick(w: World, mine: set[int]) -> list[int]:
    """Tick at once, as long as some of these units are not free; how many each tick made free."""
    gone = []
    while mine - free(w):
        assert (w.engine.next_deadline() or 0) <= w.now_ns
        before = len(mine - free(w))
        w.engine.tick(w.now_ns)
        gone.append(before - len(mine - free(w)))
        w.engine.audit()
    return gone


def test_what_ends_at_once_is_taken_back_in_parts_of_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that dies with hundreds of tickets does not make everybody else wait."""
    monkeypatch.setattr("xkv_gateway.core.tickets.EXPIRED_KEYS_PER_TURN", 5)
    monkeypatch.setattr("xkv_gateway.core.removal.SETTLED_PER_TURN", 4)
    w = world()
    mine: set[int] = set()
    for number in range(6):
        mine |= units(granted(w, [b"%d %d" % (number, at) for at in range(3)]))
    w.now_ns += TTL_NS
    left = []
    while w.engine.tickets.by_id:
        assert (w.engine.next_deadline() or 0) <= w.now_ns
        w.engine.tick(w.now_ns)
        left.append(len(w.engine.tickets.by_id))
    assert left == [4, 2, 0]
    w.now_ns += GRACE_NS
    assert freed_by_each_tick(w, mine) == [4, 4, 4, 4, 2]


def test_what_a_run_before_has_left_is_freed_in_parts_of_a_bounded_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("xkv_gateway.core.removal.SETTLED_PER_TURN", 4)
    w = world()
    mine = units(granted(w, [b"%d" % at for at in range(7)]))
    w.persist()
    again = after_crash(w, w.now_ns + GRACE_NS)
    assert isinstance(again.begin([b"later"])[0], WritePlan)
    again.now_ns += GRACE_NS
    assert freed_by_each_tick(again, mine) == [4, 3]
    again.persist()
    assert not again.engine._removal.next_deadline()
