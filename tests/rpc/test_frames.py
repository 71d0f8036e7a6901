"""Messages of very many frames are answered, and hold nobody up."""

from __future__ import annotations

import msgpack

from tests.rpc.harness import DictService, RawClient, serving, wait_until
from tests.rpc.test_codec import packed
from xkv_rpc.doors import Admits, Door
from xkv_rpc.transport import FRAMES_PER_TURN, Received, Router, SendOutcome

PAYLOADS_MAX = 16


def test_a_message_of_many_frames_is_taken_in_several_turns_between_which_others_are_sent_to() -> None:
    router = Router(payload_bytes_max=1 << 20, payloads_max=PAYLOADS_MAX)
    endpoint = router.bind(Door("tcp://127.0.0.1:0", Admits.ANYONE))
    try:
        with RawClient(endpoint) as other, RawClient(endpoint) as client:
            other.send(b"who")
            received: list[Received] = []

            def take() -> bool:
                message = router.receive()
                if message is not None:
                    received.append(message)
                return message is not None

            wait_until(take, "the first message")
            count = 2 * FRAMES_PER_TURN + 5
            client.send(b"header", *[b"x"] * count)
            wait_until(lambda: take() or bool(router.unfinished), "the beginning of the second message")
            assert len(received) == 1
            assert router.send(received[0].peer, b"meanwhile", ())[0] is SendOutcome.SENT
            assert other.receive_frames() == [b"meanwhile"]
            assert not take()
            assert take()
            assert not router.unfinished
            message = received[1]
            assert message.header == b"header"
            assert (len(message.payloads), len(message.lengths)) == (PAYLOADS_MAX, PAYLOADS_MAX + 1)
            assert not take()
    finally:
        router.close(0)
        router.terminate()


def test_many_frames_get_one_reply_and_what_came_behind_them_is_served() -> None:
    with serving(DictService()) as served, RawClient(served.endpoint) as client:
        ping = msgpack.packb({"v": 1, "id": 7, "op": "ping"})
        client.send(ping, *[b""] * (3 * FRAMES_PER_TURN))
        client.send(ping)
        refused = client.receive()
        assert (refused["ok"], refused["error"]["code"], refused["error"]["field"]) == (
            False,
            "bad_request",
            "payloads",
        )
        assert client.receive() == {"v": 1, "id": 7, "ok": True}
        assert client.receive_frames(0.1) is None


def test_of_far_too_many_fields_one_is_named() -> None:
    fields = {f"f{number}": number for number in range(40)}
    with serving(DictService()) as served, RawClient(served.endpoint) as client:
        error = client.ask(packed("ping", fields))["error"]
    assert error["code"] == "bad_request"
    assert error["field"] in fields


def test_two_requests_of_one_peer_with_one_id_are_two_requests() -> None:
    service = DictService()
    identity = {"ns": "n", "scope": b"s"}
    with serving(service) as served, RawClient(served.endpoint) as client:
        keys = [b"a", b"b"]
        assert client.ask(packed("store", {**identity, "keys": keys, "sizes": [1, 1]}), b"A", b"B")["ok"]
        for key in keys:
            client.send(packed("load", {**identity, "keys": [key]}, id=9))
        replies = [client.receive_frames() or [] for _ in keys]
        assert [msgpack.unpackb(header)["id"] for header, _ in replies] == [9, 9]
        assert [payload for _, payload in replies] == [b"A", b"B"]
        assert served.run(lambda: served.server.in_flight) == 0
