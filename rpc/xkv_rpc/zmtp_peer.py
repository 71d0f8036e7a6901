"""One end of a ZMTP connection with the NULL mechanism: the server's ROUTER, or a client's DEALER (rfc.zeromq.org, 23 and 37/ZMTP). Pure.

The owner of the socket feeds what it receives, sends what `out` holds, and takes `messages`. Nothing is kept of a message
beyond its bounds: of too many or too large payloads only the lengths are noted, so that it can be refused by name, and what
is beyond all reason is a `PeerFault`, after which the connection is of no use. The result does not depend on how the bytes
were cut into chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from xkv_rpc import zmtp
from xkv_rpc.errors import BadReplyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from xkv_rpc.zmtp import Head

FRAMES_MAX: Final = 1 << 16
"""Frames of one message; beyond them its sender is let go."""
FRAMES_PER_CALL: Final = 1024
"""Frames looked at in one call; the rest of the bytes is for the next one, so that tiny frames hold nobody up."""
FRAME_BYTES: Final = 256
"""What keeping a frame costs beside its own bytes."""
SMALL_HEADER_BYTES_MAX: Final = 64 << 10
"""A header up to this size needs no room, and stays when its message is let go: for the id."""
DIRECT_FROM_BYTES: Final = 16 << 10
"""The rest of a body from this size on is received straight to where it stays."""
IDENTITY_BYTES_MAX: Final = 255
_SERVERS: Final = frozenset({b"ROUTER"})
_PEERS: Final = frozenset({b"DEALER", b"REQ", b"ROUTER"})
_GREETED_LIKE_THREE: Final = 11
"""Bytes of a greeting that tell the version."""


class PeerFault(Exception):  # noqa: N818 - it is the peer's
    """What the peer sends is not ZMTP 3 with NULL, or beyond all bounds. The connection ends."""


class PeerState(Enum):
    """How far a connection is."""

    GREETING = "waiting for the greeting"
    HANDSHAKE = "waiting for READY"
    TRAFFIC = "open"
    OVER = "over"


class PeerEvent(Enum):
    """What moves it."""

    GREETED = "a greeting that fits"
    REFUSED = "a greeting that fits, of a peer that is not let in"
    READY = "READY of a type that fits"


TRANSITIONS: Final[dict[tuple[PeerState, PeerEvent], PeerState]] = {
    (PeerState.GREETING, PeerEvent.GREETED): PeerState.HANDSHAKE,
    (PeerState.GREETING, PeerEvent.REFUSED): PeerState.OVER,
    (PeerState.HANDSHAKE, PeerEvent.READY): PeerState.TRAFFIC,
}


class PeerMessage(NamedTuple):
    """A message. `lengths` has more entries than `payloads` where payloads were beyond the bounds and let go."""

    header: bytes
    payloads: list[memoryview]
    lengths: list[int]
    kept: bool = True
    """False: there was no room for it while it came. All of it was let go, a large header too."""


@dataclass(frozen=True, slots=True)
class PeerBounds:
    """What is kept of one message."""

    frame_bytes_max: int
    """A larger frame ends the connection."""
    message_bytes_max: int
    payloads_max: int


def _memory(count: int) -> memoryview:
    return memoryview(bytearray(count))


class Room:
    """What the messages of all connections may take together before they have come whole."""

    __slots__ = ("left_bytes",)

    def __init__(self, bytes_max: int) -> None:
        self.left_bytes = bytes_max


class PeerStream:
    """See the module. With `admitted` False the peer is told so in the handshake, and nothing it sends is kept.

    With `as_dealer` it is the client's end, which tells its READY first. `memory` makes the place of a body of so many bytes.
    """

    def __init__(
        self,
        bounds: PeerBounds,
        room: Room,
        *,
        admitted: bool = True,
        as_dealer: bool = False,
        memory: Callable[[int], memoryview] = _memory,
    ) -> None:
        self._bounds = bounds
        self._room = room
        self._admitted = admitted
        self.state = PeerState.GREETING
        self.identity = b""
        """The routing identity that the peer asked for."""
        self._as_dealer = as_dealer
        self._memory = memory
        self.out: list[bytes] = [zmtp.GREETING]
        """What the owner has to send, besides its own messages."""
        self.messages: list[PeerMessage] = []
        """Messages that came whole; the owner takes them away."""
        self._partial = bytearray()
        """The beginning of a greeting or of the head of a frame."""
        self._flags = 0
        self._body: memoryview | None = None
        """The body that is being received, and how much of it there is."""
        self._body_bytes = 0
        self._skip_bytes = 0
        """The rest of a body that is not kept."""
        self._skipping = False
        self._frames = 0
        self._kept_bytes = 0
        self._kept = True
        self.held_bytes = 0
        """What of the room the message takes that has begun."""
        self._header = b""
        self._payloads: list[memoryview] = []
        self._lengths: list[int] = []

    @property
    def amid(self) -> bool:
        """Whether something has begun, a head, a frame or a message, that has not come whole."""
        return bool(self._partial or self._frames or self._skipping) or self._body is not None

    def direct(self) -> memoryview | None:
        """Return where the next bytes of the connection belong, where they are many; else they are to be fed."""
        body = self._body
        if body is None or len(body) - self._body_bytes < DIRECT_FROM_BYTES:
            return None
        return body[self._body_bytes :]

    def direct_received(self, count: int) -> None:
        """Tell that `count` bytes were received to where `direct` said."""
        assert self._body is not None
        self._body_bytes += count
        whole = self._body_bytes == len(self._body)
        self._hold(count)
        if whole:
            self._end_body()

    def receive(self, chunk: memoryview) -> int:
        """Take the next bytes of the connection; return how many: what is left belongs into the next call.

        `chunk` may be reused afterwards.

        Raises:
            PeerFault: End the connection.
        """
        at, end = 0, len(chunk)
        frames = 0
        if self.state is PeerState.GREETING:
            at = self._greet(chunk)
        try:
            while at < end:
                if self.state is PeerState.OVER:
                    return end
                if self._body is None and not self._skipping:
                    if frames == FRAMES_PER_CALL:
                        break
                    frames += 1
                    at = self._next_head(chunk, at, end)
                else:
                    at = self._next_body(chunk, at, end)
        except BadReplyError as error:
            raise PeerFault(str(error)) from None
        return at

    def forget(self) -> None:
        """Give back what the message takes that has begun: the connection has ended."""
        self._room.left_bytes += self.held_bytes
        self.held_bytes = 0

    def _step(self, event: PeerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    # --- handshake

    def _greet(self, chunk: memoryview) -> int:
        partial = self._partial
        taken = min(len(chunk), zmtp.GREETING_BYTES - len(partial))
        partial += chunk[:taken]
        if partial[:1] != b"\xff" or (len(partial) >= _GREETED_LIKE_THREE and not partial[9] & 1):
            raise PeerFault("not a greeting of ZMTP 3")
        if len(partial) == zmtp.GREETING_BYTES:
            try:
                zmtp.check_greeting(bytes(partial))
            except BadReplyError as error:
                raise PeerFault(str(error)) from None
            self._partial = bytearray()
            if self._admitted:
                self._step(PeerEvent.GREETED)
                if self._as_dealer:
                    self.out.append(zmtp.ready(b"DEALER"))
            else:
                self.out.append(zmtp.refusal())
                self._step(PeerEvent.REFUSED)
        return taken

    def _shake_hands(self, body: bytes) -> None:
        kind, self.identity = zmtp.parse_ready(body)
        peers = _SERVERS if self._as_dealer else _PEERS
        if kind not in peers or len(self.identity) > IDENTITY_BYTES_MAX:
            raise PeerFault("sockets of these two types do not talk to each other")
        if not self._as_dealer:
            self.out.append(zmtp.ready(b"ROUTER"))
        self._step(PeerEvent.READY)

    # --- frames

    def _next_head(self, chunk: memoryview, at: int, end: int) -> int:
        partial = self._partial
        if not partial:
            head = zmtp.parse_head(chunk, at, end)
            if head is None:
                partial += chunk[at:end]
                return end
            at += head.head_bytes
            body_end = at + head.body_bytes
            if body_end <= end and not self._beyond(head):
                self._flags = head.flags
                body = bytes(chunk[at:body_end])
                if head.flags & zmtp.COMMAND:
                    self._take(body)
                elif self._frames or head.flags & zmtp.MORE:
                    self._hold(head.body_bytes)
                    self._note(body, head.body_bytes)
                else:
                    # The usual message: a header alone.
                    self.messages.append(PeerMessage(body, [], []))
                return body_end
        else:
            # Byte by byte: how long a head is depends on its first one.
            partial.append(chunk[at])
            at += 1
            head = zmtp.parse_head(partial, 0, len(partial))
            if head is None:
                return at
            self._partial = bytearray()
        self._flags = head.flags
        if self._beyond(head):
            self._skipping = True
            self._skip_bytes = head.body_bytes
        else:
            self._body = self._memory(head.body_bytes)
            self._body_bytes = 0
        if not head.body_bytes:
            self._end_body()
        return at

    def _beyond(self, head: Head) -> bool:
        """Whether a frame is not to be kept.

        Raises:
            PeerFault: It is not even to be received.
        """
        bounds = self._bounds
        if head.command:
            if head.body_bytes > zmtp.COMMAND_BYTES_MAX:
                raise PeerFault("a command larger than any of ZMTP 3")
            return False
        if self.state is not PeerState.TRAFFIC:
            raise PeerFault("a message before the handshake")
        if head.body_bytes > bounds.frame_bytes_max or self._frames >= FRAMES_MAX:
            raise PeerFault("a message beyond all bounds")
        return not self._kept or (
            self._frames > 0
            and (
                len(self._payloads) < len(self._lengths)
                or len(self._payloads) >= bounds.payloads_max
                or self._kept_bytes + head.body_bytes > bounds.message_bytes_max
            )
        )

    def _next_body(self, chunk: memoryview, at: int, end: int) -> int:
        if self._skipping:
            taken = min(self._skip_bytes, end - at)
            self._skip_bytes -= taken
            if not self._skip_bytes:
                self._end_body()
            return at + taken
        body = self._body
        assert body is not None
        start = self._body_bytes
        taken = min(len(body) - start, end - at)
        body[start : start + taken] = chunk[at : at + taken]
        self._body_bytes = start + taken
        self._hold(taken)
        if self._body_bytes == len(body):
            self._end_body()
        return at + taken

    def _hold(self, count: int) -> None:
        """Take room for bytes of a message that came; where there is none, let go of all of it."""
        if self._flags & zmtp.COMMAND or not self._kept:
            return
        if not self._frames and (count if self._body is None else len(self._body)) <= SMALL_HEADER_BYTES_MAX:
            return
        count += FRAME_BYTES
        if count <= self._room.left_bytes:
            self._room.left_bytes -= count
            self.held_bytes += count
            return
        self.forget()
        self._kept = False
        self._payloads, self._lengths = [], []
        if len(self._header) > SMALL_HEADER_BYTES_MAX:
            self._header = b""
        if self._body is not None:
            self._skipping = True
            self._skip_bytes = len(self._body) - self._body_bytes
            self._body = None

    def _end_body(self) -> None:
        if self._skipping:
            self._skipping = False
            self._note(None, 0)
            return
        body = self._body
        assert body is not None
        self._body = None
        self._take(body.toreadonly())

    def _take(self, body: bytes | memoryview) -> None:
        """Take a whole frame."""
        if self._flags & zmtp.COMMAND:
            if self.state is PeerState.HANDSHAKE:
                self._shake_hands(bytes(body))
                return
            answer = zmtp.pong(bytes(body))
            if answer is not None:
                self.out.append(answer)
            return
        self._note(body, len(body))

    def _note(self, body: bytes | memoryview | None, kept_bytes: int) -> None:
        """Add a frame to the message; None: one that was not kept."""
        if not self._kept:
            body = None
        if self._frames == 0:
            self._header = b"" if body is None else bytes(body)
        elif body is not None:
            self._payloads.append(memoryview(body))
            self._lengths.append(kept_bytes)
        elif len(self._lengths) == len(self._payloads):
            # One entry too many says enough.
            self._lengths.append(0)
        self._frames += 1
        self._kept_bytes += kept_bytes
        if not self._flags & zmtp.MORE:
            self.messages.append(PeerMessage(self._header, self._payloads, self._lengths, self._kept))
            self._header, self._payloads, self._lengths = b"", [], []
            self._frames = self._kept_bytes = 0
            self._kept = True
            self.forget()
