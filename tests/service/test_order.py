"""Requests of one connection take effect in the order of their arrival."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_gateway.service.order import ConnectionOrder, Footprint


def store(*keys: bytes, namespace: str = "n", scope: bytes = b"") -> Footprint:
    return Footprint(namespace, scope, list(keys), writes=True)


def read(*keys: bytes, namespace: str = "n", scope: bytes = b"") -> Footprint:
    return Footprint(namespace, scope, list(keys), writes=False)


def test_a_read_of_a_key_that_is_being_stored_waits_for_the_store() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    assert order.arrive("store", store(b"a", b"b"))
    assert not order.arrive("load", read(b"b"))
    assert list(order.finished(store(b"a", b"b"))) == ["load"]
    assert order.idle


def test_what_comes_behind_a_waiting_request_waits_too() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    order.arrive("store", store(b"a"))
    assert not order.arrive("delete", read(b"a"))
    assert not order.arrive("other", read(b"z"))
    assert not order.arrive("release", None)
    assert list(order.finished(store(b"a"))) == ["delete", "other", "release"]


def test_stores_of_other_keys_and_reads_do_not_wait() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    assert order.arrive("one", store(b"a"))
    assert order.arrive("two", store(b"b"))
    assert order.arrive("three", read(b"c"))
    assert order.arrive("four", None)


def test_the_same_key_in_another_namespace_or_scope_is_another_object() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    order.arrive("one", store(b"a"))
    assert order.arrive("two", read(b"a", namespace="m"))
    assert order.arrive("three", read(b"a", scope=b"s"))


def test_two_stores_of_one_key_start_one_after_the_other() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    assert order.arrive("one", store(b"a"))
    assert not order.arrive("two", store(b"a"))
    assert not order.arrive("three", store(b"a"))
    assert list(order.finished(store(b"a"))) == ["two"]
    assert list(order.finished(store(b"a"))) == ["three"]
    assert list(order.finished(store(b"a"))) == []
    assert order.idle


footprints = st.builds(
    Footprint,
    st.just("n"),
    st.just(b""),
    st.lists(st.sampled_from([b"a", b"b", b"c"]), unique=True),
    st.booleans(),
)


@settings(derandomize=True, max_examples=200)
@given(st.lists(footprints, max_size=12), st.randoms(use_true_random=False))
def test_every_request_starts_once_in_order_and_never_beside_a_conflicting_store(
    requests: list[Footprint], rng: object
) -> None:
    order: ConnectionOrder[int] = ConnectionOrder()
    started: list[int] = []
    writing: list[int] = []

    def start(index: int) -> None:
        started.append(index)
        for other in writing:
            assert set(requests[other].keys).isdisjoint(requests[index].keys)
        if requests[index].writes and requests[index].keys:
            writing.append(index)

    for index, footprint in enumerate(requests):
        if order.arrive(index, footprint):
            start(index)
    while writing:
        done = rng.choice(writing)  # type: ignore[attr-defined]
        writing.remove(done)
        for index in order.finished(requests[done]):
            start(index)
    assert started == list(range(len(requests)))
    assert order.idle


def test_a_store_of_nothing_finishes_at_once_or_in_its_turn() -> None:
    order: ConnectionOrder[str] = ConnectionOrder()
    assert order.arrive("nothing", store())
    assert list(order.finished(store())) == []
    assert order.idle

    assert order.arrive("one", store(b"a"))
    assert not order.arrive("two", store(b"a"))
    assert not order.arrive("nothing", store())
    assert list(order.finished(store(b"a"))) == ["two", "nothing"]
    assert list(order.finished(store())) == []
    assert list(order.finished(store(b"a"))) == []
    assert order.idle
