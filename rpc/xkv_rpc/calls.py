"""What the server hands to the service: one `Call` a request, to be answered exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from xkv_rpc.doors import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xkv_rpc.doors import Grant
    from xkv_rpc.errors import RpcError
    from xkv_rpc.messages import PeerId, Reply, Request

Buffer: TypeAlias = bytes | bytearray | memoryview
"""What a payload may be: contiguous bytes. It must not change before the transport has sent it."""


class Tracking(Protocol):
    """Whether a connection still refers to the payloads of a message."""

    @property
    def done(self) -> bool:
        """Whether it is done with them: sent, or dropped with their connection."""


class CallSink(Protocol):
    """Where answers go (the server)."""

    def send_reply(self, call: Call, reply: Reply, payloads: Sequence[Buffer]) -> None:
        """Send a reply of success."""

    def send_error(self, call: Call, error: RpcError) -> None:
        """Send a reply of failure."""


class Call:
    """One request of one peer. Answer it once, with `reply` or `fail`, now or later, from the loop of the server.

    Attributes:
        peer: Who asks.
        request: The decoded, validated request.
        payloads: The inline payload frames of a store without region, as received: no copy was made, and they live as
            long as something refers to them. Their bytes count as in flight until the call is answered.
        payload_bytes: Their sum.
        received_ns: Monotonic time at which the server took the request.
        request_id: The client's number for it.
        grant: What the peer may touch; the namespace that the request names is among it already.
    """

    __slots__ = (
        "_answered",
        "_sink",
        "grant",
        "payload_bytes",
        "payloads",
        "peer",
        "received_ns",
        "request",
        "request_id",
    )

    def __init__(
        self,
        sink: CallSink,
        peer: PeerId,
        request_id: int,
        request: Request,
        payloads: list[memoryview],
        payload_bytes: int,
        received_ns: int,
        grant: Grant = EVERYTHING,
    ) -> None:
        self._sink = sink
        self._answered = False
        self.peer = peer
        self.request_id = request_id
        self.request = request
        self.payloads = payloads
        self.payload_bytes = payload_bytes
        self.received_ns = received_ns
        self.grant = grant

    @property
    def answered(self) -> bool:
        """Whether `reply` or `fail` has been called."""
        return self._answered

    def reply(self, reply: Reply, payloads: Sequence[Buffer] = ()) -> None:
        """Answer with success. `payloads` (inline load) are sent without a copy: do not change them afterwards."""
        assert not self._answered, "a call is answered once"
        self._sink.send_reply(self, reply, payloads)
        self._answered = True

    def fail(self, error: RpcError) -> None:
        """Answer with an error."""
        assert not self._answered, "a call is answered once"
        self._sink.send_error(self, error)
        self._answered = True


class Handler(Protocol):
    """The service behind the protocol."""

    def handle(self, call: Call) -> None:
        """Take the request. Called from the loop, in arrival order for each peer; never blocks; answers now or later.

        An `RpcError` that is raised is the answer; anything else that is raised is answered with `internal`.
        """
