"""The two sides of an authentication, joined: what succeeds, and that nothing damaged does."""

from __future__ import annotations

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nvmeof.dhchap.exchange import (
    CARD,
    HOST,
    NQNS,
    OTHER,
    Counted,
    Exchange,
    card_keys,
    host_keys,
)
from xkv_nvmeof.dhchap.controller import ControllerAuthentication
from xkv_nvmeof.dhchap.crypto import Group, Hash, prime
from xkv_nvmeof.dhchap.host import AuthenticationFailed, Fault, HostAuthentication, HostKeys
from xkv_nvmeof.dhchap.messages import (
    Challenge,
    Explanation,
    Failure,
    MessageId,
    Negotiate,
    Reply,
    message_id,
)
from xkv_nvmeof.dhchap.states import (
    CONTROLLER_TABLE,
    HOST_TABLE,
    ControllerEvent,
    ControllerState,
    HostState,
)

SMALL = (Group.FFDHE2048,)


@pytest.mark.parametrize("mutual", [False, True])
@pytest.mark.parametrize(("kind", "group"), list(itertools.product(Hash, Group)))
def test_right_keys_succeed_with_every_hash_and_group(kind: Hash, group: Group, *, mutual: bool) -> None:
    keys = host_keys(controller=CARD if mutual else None, hashes=(kind,), groups=(group,))
    exchange = Exchange(keys, card_keys()).run()
    assert exchange.failure is None
    assert exchange.both_done
    assert len(exchange.messages) == (5 if mutual else 4)
    challenge = Challenge.from_bytes(exchange.messages[1])
    assert (challenge.hash, challenge.group) == (kind, group)
    assert len(challenge.public) == group.size_bytes


def test_the_card_takes_the_first_of_its_own_list_that_the_host_offers() -> None:
    card = card_keys(hashes=(Hash.SHA_256, Hash.SHA_512), groups=(Group.FFDHE3072, Group.FFDHE2048))
    exchange = Exchange(host_keys(groups=(Group.FFDHE2048, Group.NULL)), card).run()
    challenge = Challenge.from_bytes(exchange.messages[1])
    assert (challenge.hash, challenge.group) == (Hash.SHA_256, Group.FFDHE2048)


def test_a_wrong_host_key_is_told_as_such() -> None:
    exchange = Exchange(host_keys(OTHER, groups=SMALL), card_keys()).run()
    assert exchange.failure is not None
    assert exchange.failure.fault is Fault.HOST_KEY
    assert exchange.failure.farewell is None
    assert exchange.card.failed
    assert Failure.from_bytes(exchange.messages[-1]).explanation == Explanation.FAILED


@pytest.mark.parametrize("name", ["host", "card"])
def test_a_key_is_bound_to_the_names_of_both(name: str) -> None:
    exchange = Exchange(host_keys(controller=CARD, groups=SMALL), card_keys())
    names = (NQNS[0] + "x", NQNS[1]) if name == "host" else (NQNS[0], NQNS[1] + "x")
    exchange.card = ControllerAuthentication(card_keys(), names)
    assert exchange.run().failure is not None


def test_a_controller_that_does_not_know_its_key_is_refused_and_told() -> None:
    exchange = Exchange(host_keys(controller=OTHER, groups=SMALL), card_keys()).run()
    assert exchange.failure is not None
    assert exchange.failure.fault is Fault.CONTROLLER_KEY
    assert message_id(exchange.messages[-1])[0] == MessageId.FAILURE2
    assert exchange.card.failed


def test_a_controller_without_a_key_of_its_own_cannot_pass_for_the_right_one() -> None:
    exchange = Exchange(host_keys(controller=CARD, groups=SMALL), card_keys(controller=None)).run()
    assert exchange.failure is not None
    assert not exchange.both_done


def test_a_controller_that_leaves_out_its_proof_is_refused() -> None:
    def strip(number: int, message: bytes) -> bytes:
        return message[:8] + b"\0" + message[9:16] if number == 3 else message

    exchange = Exchange(host_keys(controller=CARD, groups=SMALL), card_keys(), strip).run()
    assert exchange.failure is not None
    assert exchange.failure.fault is Fault.CONTROLLER_KEY


def test_a_controller_that_reflects_the_hosts_own_response_is_refused() -> None:
    exchange = Exchange(host_keys(controller=HOST, groups=(Group.NULL,)), card_keys())

    def reflect(number: int, message: bytes) -> bytes:
        return message[:16] + exchange.messages[2][16:80] if number == 3 else message

    exchange.damage = reflect
    failure = exchange.run().failure
    assert failure is not None
    assert failure.fault is Fault.CONTROLLER_KEY


@pytest.mark.parametrize(
    ("keys", "explanation"),
    [
        (host_keys(hashes=(Hash.SHA_256,)), Explanation.HASH_NOT_USABLE),
        (host_keys(groups=(Group.NULL,)), Explanation.GROUP_NOT_USABLE),
    ],
)
def test_nothing_in_common_is_told_as_such(keys: HostKeys, explanation: Explanation) -> None:
    exchange = Exchange(keys, card_keys(hashes=(Hash.SHA_512,), groups=(Group.FFDHE2048,))).run()
    assert exchange.failure is not None
    assert exchange.failure.fault is Fault.NOT_OFFERED
    assert Failure.from_bytes(exchange.messages[-1]).explanation == explanation


def test_secure_channel_concatenation_is_refused() -> None:
    card = ControllerAuthentication(card_keys(), NQNS)
    card.take(Negotiate(3, (1,), (0,), concatenation=1).to_bytes())
    failure = Failure.from_bytes(card.give())
    assert (failure.transaction, failure.explanation) == (3, Explanation.CONCATENATION_MISMATCH)


def test_another_protocol_is_refused() -> None:
    card = ControllerAuthentication(card_keys(), NQNS)
    card.take(Negotiate(3, (1,), (0,), protocol=2).to_bytes())
    assert Failure.from_bytes(card.give()).explanation == Explanation.PROTOCOL_NOT_USABLE


def test_unknown_hashes_and_groups_in_an_offer_do_not_matter() -> None:
    card = ControllerAuthentication(card_keys(), NQNS)
    card.take(Negotiate(3, (9, 2), (77, 1)).to_bytes())
    challenge = Challenge.from_bytes(card.give())
    assert (challenge.hash, challenge.group) == (Hash.SHA_384, Group.FFDHE2048)


def _keys(mutual: bool) -> HostKeys:
    return host_keys(controller=CARD if mutual else None, hashes=(Hash.SHA_256,), groups=(Group.FFDHE2048,))


@functools.cache
def _whole(mutual: bool) -> list[bytes]:
    """Return the messages of an exchange that nobody damages; they are the same each time."""
    return Exchange(_keys(mutual), card_keys()).run().messages


@pytest.mark.parametrize("mutual", [False, True])
@settings(derandomize=True, max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damaged_message_authenticates_anybody(mutual: bool, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, 3))

    def damage(index: int, message: bytes) -> bytes:
        if index != number:
            return message
        if data.draw(st.booleans()):
            return message[: data.draw(st.integers(0, len(message) - 1))]
        at = data.draw(st.integers(0, len(message) - 1))
        return message[:at] + bytes([message[at] ^ data.draw(st.integers(1, 255))]) + message[at + 1 :]

    exchange = Exchange(_keys(mutual), card_keys(), damage).run()
    # Reserved fields may be anything, and so may the lists of an offer, as long as what was chosen stays in it.
    whole = _whole(mutual)
    harmless = exchange.messages == whole or _differs_in_reserved_only(exchange.messages, whole, number)
    assert harmless or not exchange.both_done
    if exchange.failure is None and not exchange.both_done:
        assert exchange.card.state in {ControllerState.FAILURE1, ControllerState.SUCCESS1}


_FREE = {
    0: {2, 3, 9, 10, 11, *range(13, 42), *range(43, 72)},
    1: {2, 3, 7},
    2: {2, 3, 7, 9, *range(48, 80)},
    3: {2, 3, 6, 7, *range(9, 16)},
}
"""Places whose content does not matter: reserved ones, the rest of the lists, a challenge that asks for nothing."""


def _differs_in_reserved_only(got: list[bytes], whole: list[bytes], number: int) -> bool:
    one, other = got[number], whole[number]
    if number in (1, 3):  # what the controller sends comes with padding behind it
        one = one.ljust(len(other), b"\0")
    return len(one) == len(other) and all(
        a == b or index in _FREE[number] for index, (a, b) in enumerate(zip(one, other, strict=True))
    )


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=120), min_size=1, max_size=4), st.data())
def test_rubbish_never_opens_a_queue_and_is_always_answered(
    rubbish: list[bytes], data: st.DataObject
) -> None:
    card = ControllerAuthentication(card_keys(), NQNS)
    if data.draw(st.booleans()):
        card.take(Negotiate(7, (1,), (0,)).to_bytes())
        card.give()
    for message in rubbish:
        if card.failed:
            break
        card.take(message)
        assert not card.done
    if not card.failed:
        kind, _transaction = message_id(card.give())
        assert kind == MessageId.FAILURE1
    assert card.failed


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_rubbish_never_gets_an_answer_out_of_a_host(rubbish: bytes) -> None:
    host = HostAuthentication(host_keys(), NQNS, 7, Counted("host"))
    host.begin()
    with pytest.raises(AuthenticationFailed):
        host.answer(rubbish)
    assert host.state is HostState.FAILED


P = prime(Group.FFDHE2048)


@pytest.mark.parametrize("swapped", [1, 2], ids=["of the card", "of the host"])
@pytest.mark.parametrize("value", [0, 1, P - 1, P, 1 << 8 * 259], ids=["0", "1", "p-1", "p", "long"])
def test_a_public_value_that_gives_the_key_away_is_refused(value: int, swapped: int) -> None:
    public = value.to_bytes(256 if value <= P else 260, "big")

    def swap(index: int, message: bytes) -> bytes:
        if index != swapped:
            return message
        head = message[:-256]
        return head[:10] + len(public).to_bytes(2, "little") + head[12:] + public

    exchange = Exchange(host_keys(controller=CARD, groups=SMALL), card_keys(), swap).run()
    assert exchange.failure is not None
    assert exchange.failure.fault is Fault.PROTOCOL


def test_a_recorded_reply_does_not_open_a_second_queue() -> None:
    first = Exchange(host_keys(groups=(Group.NULL,)), card_keys()).run()
    second = ControllerAuthentication(ControllerAuthentication(card_keys(), NQNS)._keys, NQNS)
    second._keys.entropy(5)  # the second queue gets another challenge
    second.take(first.messages[0])
    second.give()
    second.take(first.messages[2])
    assert Failure.from_bytes(second.give()).explanation == Explanation.FAILED


def test_a_reply_before_the_challenge_was_read_is_out_of_order() -> None:
    card = ControllerAuthentication(card_keys(), NQNS)
    card.take(Negotiate(7, (1,), (0,)).to_bytes())
    card.take(Reply(7, bytes(32), 0, b"", b"").to_bytes())
    assert Failure.from_bytes(card.give()).explanation == Explanation.INCORRECT_MESSAGE


def test_the_tables_lead_to_an_end_from_everywhere() -> None:
    for table, ends in (
        (HOST_TABLE, {HostState.DONE, HostState.FAILED}),
        (CONTROLLER_TABLE, {ControllerState.DONE, ControllerState.FAILED}),
    ):
        for state in type(next(iter(ends))):
            reached = {state}
            for _step in range(10):
                reached |= {to for (start, _event), to in table.items() if start in reached}
            assert reached & ends
    assert (ControllerState.DONE, ControllerEvent.REFUSED) not in CONTROLLER_TABLE
