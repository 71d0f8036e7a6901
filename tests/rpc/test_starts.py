"""Starts with clients that are there before the server is: whoever may not come in never causes a handler to run."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.ports import held_port
from tests.rpc.curve import Keyring, raw_client
from tests.rpc.harness import DictService, RawClient, serving, wait_until
from tests.rpc.test_codec import packed

if TYPE_CHECKING:
    from xkv_rpc.calls import Call

STARTS = 200
FROM_PLAIN, FROM_STRANGER, FROM_ALICE = b"plain", b"stranger", b"alice"


class Recorder(DictService):
    """Remembers whose requests were handled: each names itself in its key."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def handle(self, call: Call) -> None:
        self.seen += getattr(call.request, "keys", [])
        super().handle(call)


def request(who: bytes) -> bytes:
    return packed("lookup", {"ns": "", "scope": b"", "keys": [who]})


def test_in_two_hundred_starts_no_unauthenticated_request_is_ever_handled() -> None:
    keyring = Keyring()
    alice = keyring.new("alice")
    service = Recorder()
    for start in range(STARTS):
        with held_port() as port, contextlib.ExitStack() as clients:
            endpoint = f"tcp://127.0.0.1:{port}"
            plain, stranger, known = map(
                clients.enter_context,
                (
                    RawClient(endpoint, RECONNECT_IVL=1),
                    raw_client(endpoint, keyring.stranger(), RECONNECT_IVL=1),
                    raw_client(endpoint, alice, RECONNECT_IVL=1),
                ),
            )
            for client, who in ((plain, FROM_PLAIN), (stranger, FROM_STRANGER), (known, FROM_ALICE)):
                client.send(request(who))
            with serving(service, endpoints=[keyring.door(endpoint)], doorkeeper=keyring.doorkeeper):
                assert known.receive()["ok"]
                wait_until(lambda least=start + 1: keyring.doorkeeper.refused >= least, "the stranger knocks")
    assert service.seen == [FROM_ALICE] * STARTS
