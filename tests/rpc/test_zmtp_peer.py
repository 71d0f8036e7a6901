"""The server's end of a ZMTP connection: however its bytes are cut, the same comes of it; and what is refused."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xkv_rpc import zmtp
from xkv_rpc.zmtp_peer import (
    DIRECT_FROM_BYTES,
    FRAMES_MAX,
    FRAMES_PER_CALL,
    TRANSITIONS,
    PeerBounds,
    PeerEvent,
    PeerFault,
    PeerMessage,
    PeerState,
    PeerStream,
    Room,
)

BOUNDS = PeerBounds(frame_bytes_max=1 << 17, message_bytes_max=1 << 18, payloads_max=4)
HELLO = zmtp.GREETING + zmtp.ready(b"DEALER")


def frames(*bodies: bytes) -> bytes:
    last = len(bodies) - 1
    return b"".join(zmtp.frame_head(len(body), more=at < last) + body for at, body in enumerate(bodies))


def heard(
    stream: bytes, cuts: Random | None = None, *, admitted: bool = True, room: Room | None = None
) -> PeerStream:
    """Feed a stream whole, or cut anywhere, with the large bodies received straight to their place."""
    peer = PeerStream(BOUNDS, room or Room(1 << 30), admitted=admitted)
    rest = memoryview(stream)
    while rest:
        place = peer.direct()
        if place is not None:
            taken = min(len(place), len(rest), cuts.randrange(1, 1 << 15) if cuts else len(rest))
            place[:taken] = rest[:taken]
            peer.direct_received(taken)
        else:
            taken = min(len(rest), cuts.choice([1, 2, 9, 70, 4096]) if cuts else len(rest))
            taken = peer.receive(rest[:taken])
        rest = rest[taken:]
    return peer


def told(peer: PeerStream) -> object:
    messages = [(one.header, list(map(bytes, one.payloads)), one.lengths) for one in peer.messages]
    return messages, peer.out, peer.state, peer.identity


def test_a_dealer_is_greeted_and_its_message_comes_whole() -> None:
    peer = heard(HELLO + frames(b"header", b"", b"x" * 300))
    assert peer.state is PeerState.TRAFFIC
    assert peer.out == [zmtp.GREETING, zmtp.ready(b"ROUTER")]
    (message,) = peer.messages
    assert (message.header, list(map(bytes, message.payloads))) == (b"header", [b"", b"x" * 300])
    assert message.lengths == [0, 300]


def test_the_greeting_of_3_1_and_an_identity_are_understood() -> None:
    greeting = bytearray(zmtp.GREETING)
    greeting[11] = 1
    body = b"\x05READY\x0bsocket-TYPE\0\0\0\x03REQ\x08Identity\0\0\0\x02me\x01X\0\0\0\0"
    peer = heard(bytes(greeting) + bytes((zmtp.COMMAND, len(body))) + body)
    assert (peer.state, peer.identity) == (PeerState.TRAFFIC, b"me")


def test_a_ping_is_answered_with_its_context_also_within_a_message() -> None:
    ping = b"\x04PING\0\x0actx"
    command = bytes((zmtp.COMMAND, len(ping))) + ping
    whole = frames(b"a", b"b")
    peer = heard(HELLO + command + whole[:3] + command + whole[3:])
    pong = b"\x04PONGctx"
    assert peer.out[2:] == [bytes((zmtp.COMMAND, len(pong))) + pong] * 2
    assert peer.messages[0].header == b"a"


def test_who_is_not_let_in_hears_so_and_is_not_heard() -> None:
    peer = heard(HELLO + frames(b"header"), admitted=False)
    assert peer.state is PeerState.OVER
    assert peer.out == [zmtp.GREETING, zmtp.refusal()]
    assert not peer.messages


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.lists(
        st.lists(st.sampled_from([0, 1, 200, 255, 256, 5000, DIRECT_FROM_BYTES + 9]), min_size=1, max_size=7),
        max_size=4,
    ),
    st.integers(0, 1 << 30),
)
def test_how_the_bytes_are_cut_makes_no_difference(sizes: list[list[int]], seed: int) -> None:
    dice = Random(seed)
    stream = HELLO + b"".join(frames(*(dice.randbytes(size) for size in message)) for message in sizes)
    assert told(heard(stream)) == told(heard(stream, Random(seed)))
    whole = heard(stream).messages
    assert [len(one.lengths) for one in whole] == [min(len(message) - 1, 5) for message in sizes]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_damage_ends_the_same_way_however_it_is_cut(seed: int) -> None:
    dice = Random(seed)
    stream = bytearray(HELLO + frames(b"header", b"y" * 400) + frames(b"z"))
    for _ in range(dice.randrange(1, 4)):
        stream[dice.randrange(len(stream))] = dice.randrange(256)
    ends: list[object] = []
    for cuts in (None, Random(seed)):
        try:
            ends.append(told(heard(bytes(stream), cuts)))
        except PeerFault as fault:
            ends.append(str(fault))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x7f" + b"\x01",
        zmtp.GREETING.replace(b"NULL", b"CURV")[:64],
        zmtp.GREETING + frames(b"early"),
        zmtp.GREETING + zmtp.ready(b"PUB"),
        zmtp.GREETING + zmtp.ready(b"DEALER")[:-4] + b"\xff\xff\xff\xff",
        HELLO + b"\x80\x01",
        HELLO + b"\x02" + (1 << 40).to_bytes(8, "big"),
        HELLO + b"\x06" + (1 << 20).to_bytes(8, "big"),
    ],
)
def test_what_is_not_of_the_protocol_or_beyond_reason_ends_the_connection(stream: bytes) -> None:
    with pytest.raises(PeerFault):
        heard(stream + bytes(64))


def test_of_too_many_or_too_large_payloads_nothing_is_kept_but_that_there_were_some() -> None:
    large = b"v" * (BOUNDS.frame_bytes_max - 1)
    peer = heard(HELLO + frames(b"h", large, large, large, b"w") + frames(b"h", *[b""] * 9) + frames(b"next"))
    lengths = [(len(one.payloads), len(one.lengths)) for one in peer.messages]
    assert lengths == [(2, 3), (4, 5), (0, 0)]


def test_a_message_of_a_million_frames_costs_its_sender_the_connection_early() -> None:
    peer = heard(HELLO + b"\x01\x00" * FRAMES_MAX)
    with pytest.raises(PeerFault):
        peer.receive(memoryview(b"\x01\x00"))
    assert peer.messages == []


def test_tiny_frames_are_taken_some_at_a_time() -> None:
    peer = heard(HELLO)
    assert peer.receive(memoryview(b"\x00\x00" * 30_000)) == 2 * FRAMES_PER_CALL
    assert len(peer.messages) == FRAMES_PER_CALL
    assert peer.receive(memoryview(b"\x01\x00" * 30_000)) == 2 * FRAMES_PER_CALL


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30))
def test_what_all_messages_hold_before_they_are_whole_is_bounded_and_given_back(seed: int) -> None:
    dice = Random(seed)
    room = Room(60_000)
    peers = [heard(HELLO, room=room) for _ in range(6)]
    sizes = [[dice.choice([9, 300, 20_000]) for _ in range(3)] for _ in peers]
    streams = [memoryview(frames(b"head", *map(bytes, some)) * 2) for some in sizes]
    while any(streams):
        at = dice.choice([at for at, stream in enumerate(streams) if stream])
        chunk = streams[at][: dice.randrange(1, 30_000)]
        place = peers[at].direct()
        if place is None:
            taken = peers[at].receive(chunk)
        else:
            taken = min(len(place), len(chunk))
            place[:taken] = chunk[:taken]
            peers[at].direct_received(taken)
        streams[at] = streams[at][taken:]
        assert room.left_bytes == 60_000 - sum(peer.held_bytes for peer in peers) >= 0
    assert room.left_bytes == 60_000
    for peer in peers:
        assert [message.header for message in peer.messages] == [b"head", b"head"]
        for message in peer.messages:
            assert len(message.payloads) == (3 if message.kept else 0)


def test_a_large_header_for_which_there_is_no_room_is_let_go_and_what_follows_is_heard() -> None:
    room = Room(1000)
    peer = heard(HELLO + frames(b"h" * 99_000, b"x") + frames(b"small", b"y"), Random(1), room=room)
    told_of = [(message.header, message.kept, len(message.payloads)) for message in peer.messages]
    assert told_of == [(b"", False, 0), (b"small", True, 1)]
    peer.receive(memoryview(frames(b"begun", b"z" * 400)[:50]))
    assert peer.held_bytes
    peer.forget()
    assert room.left_bytes == 1000


def test_every_state_that_is_not_over_leads_on() -> None:
    assert {state for state, _ in TRANSITIONS} == {PeerState.GREETING, PeerState.HANDSHAKE}
    assert {event for _, event in TRANSITIONS} == set(PeerEvent)
    assert PeerMessage(b"", [], []).lengths == []
