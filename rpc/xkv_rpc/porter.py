"""Keys, and the socket on which the transport asks about handshakes (rfc.zeromq.org, 27/ZAP)."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq
from zmq.utils import z85

from xkv_rpc.doors import KEY_CHARACTERS, KeyPair, Knock

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.doors import Visit

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"
ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_FRAMES_MIN: Final = 6


def new_key_pair() -> KeyPair:
    """Make a CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def public_key_of(secret: str) -> str:
    """Return the public key of a secret one (both in Z85)."""
    return bytes(zmq.curve_public(secret.encode())).decode()


def is_key(text: str) -> bool:
    """Return whether the text is a key in Z85."""
    if len(text) != KEY_CHARACTERS or not text.isascii():
        return False
    try:
        z85.decode(text.encode())
    except (KeyError, ValueError, struct.error):
        return False
    return True


class Porter:
    """Is asked by the transport about each handshake, inside the context of a router, and answers in a thread of its own.

    So a busy loop keeps nobody waiting at the door. The socket exists before anything is bound, and a handshake waits for its
    answer, so nobody slips in before the thread runs; if that ended, nobody would be let in any more.
    """

    def __init__(self, context: ZmqContext) -> None:
        self._raw = raw = context.socket(zmq.REP)
        self._thread: threading.Thread | None = None
        raw.set(zmq.LINGER, 0)
        raw.bind(ZAP_ENDPOINT)

    def start(self, judge: Callable[[Knock], Visit]) -> None:
        """Answer from now on, until the context ends. Raises RuntimeError where there can be no thread."""
        thread = threading.Thread(target=self._run, args=(judge,), name="porter", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self, judge: Callable[[Knock], Visit]) -> None:
        try:
            while True:
                number, knock = self._question()
                self._answer(number, judge(knock))
        except zmq.ContextTerminated:
            pass
        finally:
            self._raw.close(0)

    def _question(self) -> tuple[bytes, Knock]:
        frames = self._raw.recv_multipart()
        assert len(frames) >= ZAP_FRAMES_MIN, "the transport's own question"
        _version, number, domain, address, _routing_id, mechanism, *credentials = frames
        key = credentials[0] if mechanism == b"CURVE" and credentials else b""
        knock = Knock(
            domain.decode(errors="replace"),
            address.decode(errors="replace"),
            mechanism.decode(errors="replace"),
            z85.encode(key).decode() if key else "",
        )
        return number, knock

    def _answer(self, number: bytes, visit: Visit) -> None:
        status, text = (b"200", b"OK") if visit.admitted else (b"400", b"refused")
        self._raw.send_multipart((b"1.0", number, status, text, visit.user.encode(), b""))

    def close(self) -> None:
        """Close, where the thread does not: that ends with the context."""
        if self._thread is None:
            self._raw.close(0)
