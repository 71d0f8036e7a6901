"""Keys, and the socket on which the transport asks about handshakes (rfc.zeromq.org, 27/ZAP)."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, TypeAlias

import zmq
from zmq.utils import z85

from xkv_rpc.doors import KEY_CHARACTERS, KeyPair, Knock

if TYPE_CHECKING:
    from xkv_rpc.doors import Visit

ZmqSocket: TypeAlias = "zmq.Socket[bytes]"
ZmqContext: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
ZAP_FRAMES_MIN: Final = 6

_POLLIN: Final = int(zmq.POLLIN)
_DONTWAIT: Final = int(zmq.DONTWAIT)
_EVENTS: Final = int(zmq.EVENTS)


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
    """Is asked by the transport about each handshake, inside the context of a router.

    It exists before anything is bound, and a handshake waits for its answer, so nobody slips in before it is watched.
    """

    def __init__(self, context: ZmqContext) -> None:
        self._raw = raw = context.socket(zmq.REP)
        raw.set(zmq.LINGER, 0)
        raw.bind(ZAP_ENDPOINT)

    def fileno(self) -> int:
        """Give the descriptor to watch for reading (edge-triggered)."""
        return int(self._raw.get(zmq.FD))

    def receive(self) -> tuple[bytes, Knock] | None:
        """Take one question and its number, or None where none waits. Each is answered before the next is taken."""
        if not int(self._raw.get(_EVENTS)) & _POLLIN:
            return None
        frames = self._raw.recv_multipart(_DONTWAIT)
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

    def answer(self, number: bytes, visit: Visit) -> None:
        """Answer the question that was taken."""
        status, text = (b"200", b"OK") if visit.admitted else (b"400", b"refused")
        user = visit.user.encode()
        self._raw.send_multipart((b"1.0", number, status, text, user, b""), _DONTWAIT)

    def close(self) -> None:
        """Close: from now on nobody is let in."""
        self._raw.close(0)
