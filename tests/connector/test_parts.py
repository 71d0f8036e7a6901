"""The small pure parts: states, what is recent, what is counted, which blocks an object has."""

from __future__ import annotations

import itertools
import pickle

import pytest

from tests.connector.rig import GEMMA, HASH_TOKENS, QWEN
from xkv_vllm_connector.groups import plan_groups
from xkv_vllm_connector.metadata import LoadJob, Part, StepPlan, StoreJob, WorkerReport
from xkv_vllm_connector.metrics import COUNTERS, SAMPLES_MAX, TIMINGS, Stats, merge, summary
from xkv_vllm_connector.planning import blocks_to_load, blocks_to_store, chunks_to_load
from xkv_vllm_connector.recent import Recent
from xkv_vllm_connector.requests import TRANSITIONS, Event, State, Tracked


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_an_event_that_a_state_does_not_have_raises(state: State, event: Event) -> None:
    tracked = Tracked(b"", state=state)
    if (state, event) in TRANSITIONS:
        tracked.step(event)
        assert tracked.state is TRANSITIONS[state, event]
    else:
        with pytest.raises(KeyError):
            tracked.step(event)


def test_a_barred_request_is_never_offered_anything_and_what_is_gone_stays_gone() -> None:
    assert (State.BARRED, Event.OFFER) not in TRANSITIONS
    assert not [event for event in Event if (State.GONE, event) in TRANSITIONS]
    reached, front = {State.FRESH}, [State.FRESH]
    while front:
        here = front.pop()
        for (state, _), then in TRANSITIONS.items():
            if state is here and then not in reached:
                reached.add(then)
                front.append(then)
    assert reached == set(State)


def test_the_load_ends_with_the_last_rank_and_one_failure_fails_it() -> None:
    tracked = Tracked(b"", state=State.LOADING, ranks_pending=3)
    assert not tracked.rank_done(1, failed=False)
    assert not tracked.rank_done(1, failed=True)
    assert tracked.rank_done(1, failed=False)
    assert tracked.state is State.BARRED


def test_what_is_recent_is_forgotten_in_time_and_bounded() -> None:
    recent: Recent[int] = Recent(3, 100)
    recent.add(1, 0)
    recent.add(2, 50)
    assert 1 in recent
    recent.turn(100)
    assert 1 in recent
    recent.turn(200)
    assert 1 not in recent
    for number in range(100):
        recent.add(number, 201)
    assert sum(number in recent for number in range(100)) <= 6
    recent.turn(10_000)
    assert not any(number in recent for number in range(100))


def test_counts_are_added_up_over_ranks_and_shown_whole() -> None:
    stats = Stats()
    assert stats.take() is None
    stats.add("loads")
    stats.add("loads", 2)
    for _ in range(SAMPLES_MAX + 5):
        stats.time("load_seconds", 0.5)
    data = stats.take()
    assert data is not None
    assert data["loads"] == 3
    assert len(data["load_seconds"]) == SAMPLES_MAX
    assert stats.take() is None
    merged = merge(merge({}, data), {"loads": 1, "load_seconds": [1.5]})
    assert summary(merged) == {"loads": 4, "load_seconds_max": 1.5}
    assert not set(COUNTERS) & set(TIMINGS)


def test_reports_of_ranks_add_up() -> None:
    one = WorkerReport({"a": (1, True)}, {1: (1, True)}, 0)
    other = WorkerReport({"a": (1, False), "b": (1, True)}, {1: (1, True)}, 2, unavailable=True)
    both = one.add(other)
    assert both.loads == {"a": (2, False), "b": (1, True)}
    assert both.stores == {1: (2, True)}
    assert (both.sync_failures, both.unavailable, both.empty) == (2, True, False)
    assert WorkerReport().empty


def test_what_goes_between_processes_can_and_shows_no_key_or_scope() -> None:
    part = Part(0, 7, b"hash-of-a-prompt", (1, 2), b"lease")
    plan = StepPlan(
        bytes(16), [LoadJob("r", b"scope-of-a-tenant", (part,))], [StoreJob(1, b"scope-of-a-tenant", (part,))]
    )
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan
    assert "scope-of" not in repr(plan.loads) + repr(plan.stores)
    assert "hash-of" not in repr(plan.loads) + repr(plan.stores)


def test_an_object_is_stored_only_while_the_engine_has_all_of_its_blocks() -> None:
    narrow, wide, full = plan_groups(GEMMA, 8, HASH_TOKENS, (0,)).groups
    table = [0, 0, 13, 14, 15]
    assert blocks_to_store(full, table, 0) is None
    assert blocks_to_store(full, table, 1) == (13, 14)
    assert blocks_to_store(full, table, 2) is None
    assert blocks_to_store(narrow, table, 1) == (13, 14)
    assert blocks_to_store(wide, [0, 12, 13, 14], 0) is None


def test_a_load_writes_only_blocks_that_the_engine_has_not() -> None:
    geometry = plan_groups(GEMMA, 8, HASH_TOKENS, (0,))
    narrow, wide, full = geometry.groups
    table = [11, 12, 13, 14, 15, 16]
    assert blocks_to_load(full, table, 1, 12, 24) == (0, 14)
    assert blocks_to_load(full, table, 1, 8, 24) == (13, 14)
    assert list(chunks_to_load(geometry, full, 12, 3)) == [1, 2]
    # The window of 7 tokens reaches two blocks back, that of 22 six.
    assert list(chunks_to_load(geometry, narrow, 0, 3)) == [2]
    assert list(chunks_to_load(geometry, wide, 0, 3)) == [0, 1, 2]
    assert blocks_to_load(narrow, [0, 0, 0, 0, 15, 16], 2, 0, 24) == (15, 16)
    assert blocks_to_load(narrow, [0, 0, 0, 0, 0, 16], 2, 0, 24) is None
    assert blocks_to_load(full, [11, 12, 13], 1, 0, 16) is None


def test_of_a_recurrent_group_the_state_at_the_boundary_is_loaded() -> None:
    geometry = plan_groups(QWEN, 8, HASH_TOKENS, (0,))
    state, _, full = geometry.groups
    assert list(chunks_to_load(geometry, state, 8, 5)) == [4]
    assert blocks_to_load(state, [0, 0, 0, 0, 9], 4, 8, 40) == (9,)
    assert list(chunks_to_load(geometry, full, 8, 5)) == [1, 2, 3, 4]
