"""The server: takes messages from the socket in one turn of the loop, hands requests to a handler, sends its replies.

Every message that the transport delivers gets exactly one reply. What is not a request is answered here, and so is what
finds the bounds reached (`busy`) or the server on its way out (`draining`).

Two clients that set the same routing identity: the first one is served, the second is ignored by the transport until it
connects again after the first is gone. Replies are never handed over from one to the other. Clients that set none cannot
collide.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from xkv_rpc.calls import Buffer, Call, Handler
from xkv_rpc.codec import RequestDecoder
from xkv_rpc.diagnose import RequestRefusedError, id_of
from xkv_rpc.doors import EVERYTHING, Admits, Door
from xkv_rpc.endpoints import Endpoints
from xkv_rpc.errors import ErrorCode, RpcError
from xkv_rpc.messages import OP_OF, Abort, Commit, Delete, Limits, Load, Lookup, PeerId, Reserve, Store
from xkv_rpc.outbox import Outbox
from xkv_rpc.reply_codec import ReplyEncoder
from xkv_rpc.session import Ledger, ServerBounds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xkv_rpc.doors import Doorkeeper, Grant, Knock, Visit
    from xkv_rpc.messages import Reply, Request
    from xkv_rpc.transport import Received, Router

__all__ = ["Buffer", "Call", "Handler", "PeerId", "Server", "ServerBounds", "ServerCounters"]

_log = logging.getLogger(__name__)

MESSAGES_PER_TURN: Final = 64
"""Messages taken in one turn of the loop before everything else gets its turn."""


@dataclass(slots=True)
class ServerCounters:
    """What the server has done since it was made; only ever grows."""

    requests: Counter[str] = field(default_factory=Counter)
    """Requests handed to the handler, by operation."""
    errors: Counter[str] = field(default_factory=Counter)
    """Error replies, by code."""
    bad_messages: int = 0
    """Messages that were not requests of this protocol, or beyond its limits."""
    received_payload_bytes: int = 0
    sent_replies: int = 0
    sent_bytes: int = 0
    replies_dropped_gone: int = 0
    """Replies whose peer was gone."""
    replies_dropped_full: int = 0
    """Replies of peers that do not read."""
    connections_admitted: int = 0
    """Handshakes that the doorkeeper let in ..."""
    connections_refused: int = 0
    """... and those that it did not."""


class Server:
    """Serves control protocol 1 on a ROUTER socket, from the loop that runs when it is made. Not for several threads."""

    def __init__(
        self,
        handler: Handler,
        limits: Limits,
        *,
        clock: Callable[[], int],
        bounds: ServerBounds | None = None,
        socket_mode: int = 0o600,
        doorkeeper: Doorkeeper | None = None,
        direct: bool = False,
    ) -> None:
        """Make a server that is bound to nothing yet.

        Args:
            handler: Gets the requests.
            limits: What one request may ask for.
            clock: Monotonic nanoseconds.
            bounds: What may be in flight.
            socket_mode: Permissions of the Unix sockets that `bind` makes of mere paths.
            doorkeeper: Judges each handshake, and says what each request may touch. Without one, whoever reaches an
                endpoint is served, and there can be no keys.
            direct: Whether the operations of the feature `direct` are there.
        """
        self._handler = handler
        self._clock = clock
        self._socket_mode = socket_mode
        self._loop = asyncio.get_running_loop()
        self._decoder = RequestDecoder(limits, direct=direct)
        self._encoder = ReplyEncoder()
        self._ledger = Ledger(bounds or ServerBounds())
        self._endpoints = Endpoints(
            limits,
            self._ledger.bounds.partial_bytes_max,
            self._take_now,
            None if doorkeeper is None else self._judge,
        )
        self._doorkeeper = doorkeeper
        self._judging = threading.Lock()
        self._has_keys = False
        self._outbox = Outbox(
            self._endpoints, self._ledger, self._loop, after_send=self._look_again, on_empty=self._note_idle
        )
        self._counters = ServerCounters()
        self._router: Router | None = None
        self._draining = False
        self._closing = False
        self._closed = False
        self._idle = asyncio.Event()
        self._closed_event = asyncio.Event()
        self._drain_scheduled = False
        self._in_drain = False

    async def bind(self, endpoints: Sequence[str | Door]) -> list[str]:
        """Bind all endpoints and begin to serve; returns them with the ports that were really bound.

        A mere `tcp://` endpoint admits loopback, and a mere `ipc://` one whoever may open it, where there is a doorkeeper.

        Raises:
            EndpointError: One cannot be bound. Then none is, and the server is closed.
        """
        assert not self._closed
        doors = [self._door(endpoint) if isinstance(endpoint, str) else endpoint for endpoint in endpoints]
        self._has_keys = any(door.admits is Admits.KEYS for door in doors)
        try:
            bound = self._endpoints.bind(doors)
        except BaseException:
            await self.aclose(linger_ms=0)
            raise
        self._router = self._endpoints.router
        if self._router is not None:
            self._loop.add_reader(self._router.fileno(), self._drain)
            self._look_again()
        return bound

    def _judge(self, knock: Knock) -> Visit:
        """Ask the doorkeeper; endpoints with keys do it from a thread of their own."""
        assert self._doorkeeper is not None
        with self._judging:
            return self._doorkeeper.judge(knock)

    def _door(self, endpoint: str) -> Door:
        local = endpoint.startswith("ipc://")
        return Door(endpoint, Admits.LOCAL if local else Admits.LOOPBACK, mode=self._socket_mode)

    @property
    def in_flight(self) -> int:
        """Requests that the handler has not answered yet."""
        return self._ledger.requests

    @property
    def counters(self) -> ServerCounters:
        """What was done so far."""
        outbox = self._outbox
        self._counters.sent_replies = outbox.sent_replies
        self._counters.sent_bytes = outbox.sent_bytes
        self._counters.replies_dropped_gone = outbox.dropped_gone
        self._counters.replies_dropped_full = outbox.dropped_full
        if self._doorkeeper is not None:
            self._counters.connections_admitted = self._doorkeeper.admitted
            self._counters.connections_refused = self._doorkeeper.refused
        return self._counters

    def stop_accepting(self) -> None:
        """From now on every new request is answered `draining`; those in flight are still answered."""
        self._draining = True

    async def aclose(self, *, grace_ms: int = 1000, linger_ms: int = 200) -> None:
        """Stop: wait for requests in flight and replies that wait here, then let the socket send what it holds.

        Args:
            grace_ms: The longest wait for the handler's answers.
            linger_ms: The longest wait for peers to take what was sent.
        """
        if self._closing:
            await self._closed_event.wait()
            return
        self._closing = self._draining = True
        self._note_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_ms / 1000):
                await self._idle.wait()
                await self._endpoints.stop()
        self._closed = True
        if self._router is not None:
            self._loop.remove_reader(self._router.fileno())
        self._outbox.close()
        await self._endpoints.aclose(linger_ms)
        if self._endpoints.router is not None:
            # Ending the context blocks while peers take the rest.
            await self._loop.run_in_executor(None, self._endpoints.terminate)
        self._closed_event.set()

    def _grant(self, user: str) -> Grant | None:
        if self._doorkeeper is None or not self._has_keys:
            return EVERYTHING
        return self._doorkeeper.grant_of(user)

    # --- in

    def _look_again(self) -> None:
        """See to it that the socket is looked at again: a send may have swallowed the edge of its descriptor."""
        if self._router is None:
            return
        if not self._in_drain and not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        router = self._router
        if self._closed or router is None:
            return
        self._in_drain = True
        now_ns = self._clock()
        emptied = False
        try:
            for _ in range(MESSAGES_PER_TURN):
                message = router.receive()
                if message is None:
                    emptied = router.unfinished is None
                    break
                self._take(message, now_ns)
        finally:
            self._in_drain = False
            if not emptied:
                self._look_again()

    def _take_now(self, message: Received) -> None:
        if not self._closed:
            self._take(message, self._clock())

    def _take(self, message: Received, now_ns: int) -> None:
        peer = message.peer
        if not message.kept:
            self._refuse(peer, id_of(message.header), self._busy())
            return
        try:
            request_id, request = self._decoder.decode(message.header, message.lengths)
        except RequestRefusedError as refused:
            self._counters.bad_messages += 1
            self._refuse(peer, refused.request_id, refused.error)
            return
        if len(message.payloads) < len(message.lengths):
            self._counters.bad_messages += 1
            self._refuse(
                peer, request_id, RpcError(ErrorCode.TOO_LARGE, "more payloads than one message may have")
            )
            return
        grant = self._grant(message.user)
        if grant is None:
            error = RpcError(ErrorCode.UNAUTHORIZED, "this key is not known, or not any more")
            self._refuse(peer, request_id, error)
            return
        if grant.namespaces is not None and not _covers(grant, request):
            # Before anything is looked at, so that nothing is said about what is there.
            error = RpcError(ErrorCode.FORBIDDEN, "this key may not touch that namespace", field="ns")
            self._refuse(peer, request_id, error)
            return
        if not grant.direct and _is_direct(request):
            error = RpcError(ErrorCode.FORBIDDEN, "keys do not open the direct path", field="op")
            self._refuse(peer, request_id, error)
            return
        payload_bytes = sum(message.lengths) if message.lengths else 0
        self._counters.received_payload_bytes += payload_bytes
        if self._draining:
            self._refuse(peer, request_id, RpcError(ErrorCode.DRAINING, "the server is shutting down"))
            return
        self._outbox.reap(peer)
        if not self._ledger.admit(peer, payload_bytes):
            self._refuse(peer, request_id, self._busy())
            return
        self._counters.requests[OP_OF[type(request)]] += 1
        self._dispatch(
            Call(
                self, peer, request_id, request, message.payloads, payload_bytes, now_ns, grant or EVERYTHING
            )
        )

    def _dispatch(self, call: Call) -> None:
        try:
            self._handler.handle(call)
        except RpcError as error:
            if not call.answered:
                call.fail(error)
        except Exception as error:  # noqa: BLE001  # the task boundary of control requests
            # Where it happened and what it was, but not what it said: that may hold keys.
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join(f"{frame.name}:{frame.lineno}" for frame in reversed(frames))
            _log.error(
                "control request %s failed: %s in %s", OP_OF[type(call.request)], type(error).__name__, where
            )
            if not call.answered:
                call.fail(RpcError(ErrorCode.INTERNAL, "the request failed inside the server"))

    # --- out

    def _refuse(self, peer: PeerId, request_id: int | None, error: RpcError) -> None:
        self._counters.errors[error.code.value] += 1
        self._outbox.send(peer, self._encoder.failure(request_id, error), ())

    def send_reply(self, call: Call, reply: Reply, payloads: Sequence[Buffer]) -> None:
        """Send a handler's reply (called by `Call`)."""
        header = self._encoder.success(call.request_id, reply)
        self._count_out(call)
        if self._closed:
            return
        if not self._outbox.send(call.peer, header, payloads) and payloads:
            # The peer asked for more than it takes; it deserves to hear that instead of nothing.
            self._refuse(call.peer, call.request_id, self._busy())
        self._note_idle()

    def send_error(self, call: Call, error: RpcError) -> None:
        """Send a handler's error (called by `Call`)."""
        self._count_out(call)
        if not self._closed:
            self._refuse(call.peer, call.request_id, error)
            self._note_idle()

    def _count_out(self, call: Call) -> None:
        self._ledger.answered(call.peer, call.payload_bytes)
        call.payloads = []

    def _busy(self) -> RpcError:
        retry_after_ms = self._ledger.bounds.busy_retry_after_ms
        return RpcError(ErrorCode.BUSY, "too much is in flight", retry_after_ms=retry_after_ms)

    def _note_idle(self) -> None:
        if self._closing and not self._ledger.requests and not self._outbox.waiting:
            self._idle.set()


def _is_direct(request: Request) -> bool:
    return isinstance(request, Reserve | Commit | Abort) or (isinstance(request, Lookup) and request.extents)


def _covers(grant: Grant, request: Request) -> bool:
    match request:
        case Lookup() | Load() | Store() | Delete() | Reserve():
            return grant.covers(request.ns)
        case _:
            return True
