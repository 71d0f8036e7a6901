"""The asyncio client: one connection, many calls in flight, drained like the server's socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from xkv_rpc.async_wire import AsyncWire, Unsent, served
from xkv_rpc.client_calls import AsyncCalls
from xkv_rpc.client_codec import ReplyHeader, decode_reply, encode_request, parse_reply
from xkv_rpc.errors import (
    BadReplyError,
    CallTimeoutError,
    ClientClosedError,
    ConnectionLostError,
    ConnectionResetByClientError,
    GatewayUnavailableError,
    GatewayUnreachableError,
    TooManyCallsError,
    XkvRpcError,
)
from xkv_rpc.messages import Ping, Reply, Request
from xkv_rpc.region_client import Region, path_of_regions
from xkv_rpc.session import Breaker, BreakerState, ClientOptions
from xkv_rpc.transport import Dealer, make_context, terminate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from xkv_rpc.calls import Buffer
    from xkv_rpc.porter import ZmqContext
    from xkv_rpc.transport import Tracker

_NS_PER_MS: Final = 1_000_000
REPLIES_PER_TURN: Final = 64
"""Replies taken in one turn of the loop before everything else gets its turn."""
BUFFER_RELEASE_S: Final = 5.0
"""After a reset the transport lets go of payloads as soon as its thread has its turn, within microseconds unless the machine is
very busy; this bounds the wait for that."""
_STAGES: Final[dict[type[XkvRpcError], str]] = {
    TooManyCallsError: "every call slot of the client was in use",
    GatewayUnreachableError: "no connection",
    CallTimeoutError: "no answer in time",
}


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that waits for its reply."""

    answer: asyncio.Future[tuple[ReplyHeader, list[memoryview]]]
    tracker: Tracker | Unsent | None = None


class AsyncClient(AsyncCalls):
    """An asyncio client, of one loop and one process. Calls may overlap; they are sent in the order of their making."""

    def __init__(
        self,
        endpoint: str,
        options: ClientOptions | None = None,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Make a client; nothing is connected before the first call.

        Args:
            endpoint: `tcp://ADDRESS:PORT` or `ipc://PATH`.
            options: How patient it is.
            clock: Monotonic nanoseconds.
        """
        self._endpoint = endpoint
        self._options = options or ClientOptions()
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._context: ZmqContext | None = None
        """Of libzmq, where that is needed."""
        self._dealer: Dealer | AsyncWire | None = None
        self._fds: tuple[int, ...] = ()
        self._look_scheduled = False
        self._pending: dict[int, _Pending] = {}
        self._writers: deque[asyncio.Future[None]] = deque()
        self._slots = asyncio.Semaphore(self._options.calls_max)
        self._breaker = Breaker(
            backoff_min_ns=self._options.backoff_min_ms * _NS_PER_MS,
            backoff_max_ns=self._options.backoff_max_ms * _NS_PER_MS,
        )
        # Ids begin anywhere, so that a reply to somebody else's request never looks like one to ours.
        self._ids = itertools.count(secrets.randbits(62))
        self._closed = False
        self.unmatched_replies = 0
        """Replies that came after their call had ended, or to nobody."""

    async def call(
        self, request: Request, payloads: Sequence[Buffer] = (), *, timeout_ms: int | None = None
    ) -> tuple[Reply, list[memoryview]]:
        """Send a request and wait for its reply and payloads. See `AsyncCalls` for what it raises."""
        if self._closed:
            raise ClientClosedError("the client is closed")
        timeout_s = (self._options.timeout_ms if timeout_ms is None else timeout_ms) / 1000
        deadline = self._loop.time() + timeout_s
        if self._breaker.state is not BreakerState.CLOSED and self._breaker.admit(self._clock()):
            probe_deadline = self._loop.time() + self._options.probe_timeout_ms / 1000
            await self._guarded(Ping(), (), min(deadline, probe_deadline), probing=True)
        header, frames = await self._guarded(request, payloads, deadline)
        return parse_reply(request, header), frames

    async def _guarded(
        self, request: Request, payloads: Sequence[Buffer], deadline: float, *, probing: bool = False
    ) -> tuple[ReplyHeader, list[memoryview]]:
        """Exchange, and tell the breaker how it went. An error reply is an answer like any other."""
        answered: bool | None = None
        try:
            answer = await self._exchange(request, payloads, deadline)
            answered = True
        except (TooManyCallsError, ConnectionResetByClientError):
            raise  # our own doing, which says nothing about the gateway
        except (GatewayUnavailableError, BadReplyError):
            answered = False
            raise
        finally:
            if answered is None and probing:
                answered = False  # who probes must say something
            if answered is False:
                self._breaker.failed(self._clock())
            elif answered and self._breaker.state is not BreakerState.CLOSED:
                self._breaker.succeeded()
            if probing and not answered:
                # A connection that has led nowhere is made anew for the next probe.
                self._reset(ConnectionResetByClientError("the connection was given up"))
        return answer

    async def _exchange(
        self, request: Request, payloads: Sequence[Buffer], deadline: float
    ) -> tuple[ReplyHeader, list[memoryview]]:
        request_id = next(self._ids)
        raw = encode_request(request_id, request)
        pending = _Pending(self._loop.create_future())
        stage: type[XkvRpcError] = TooManyCallsError
        try:
            async with asyncio.timeout_at(deadline), self._slots:
                stage = GatewayUnreachableError
                self._pending[request_id] = pending
                await self._send(pending, raw, payloads, deadline)
                stage = CallTimeoutError
                return await pending.answer
        except TimeoutError:
            raise stage(f"{self._endpoint}: {_STAGES[stage]}") from None
        finally:
            self._pending.pop(request_id, None)
            if not pending.answer.done():
                pending.answer.cancel()
            if pending.tracker is not None and not _answered(pending) and not pending.tracker.done:
                # The caller may change its payloads after this, so what is not sent of them must not be sent at all.
                self._reset(
                    ConnectionResetByClientError("a call with payloads on the connection was given up")
                )
                pending.tracker.wait(BUFFER_RELEASE_S)

    async def _send(self, pending: _Pending, raw: bytes, payloads: Sequence[Buffer], deadline: float) -> None:
        connect_deadline = min(deadline, self._loop.time() + self._options.connect_timeout_ms / 1000)
        if not self._writers and self._try_send(pending, raw, payloads):
            return
        turn = self._loop.create_future()
        self._writers.append(turn)
        try:
            async with asyncio.timeout_at(connect_deadline):
                while True:
                    await turn
                    if pending.answer.done() or self._try_send(pending, raw, payloads):
                        return
                    turn = self._loop.create_future()
                    self._writers.appendleft(turn)
        finally:
            with contextlib.suppress(ValueError):
                self._writers.remove(turn)
            self._wake_writer()

    def _try_send(self, pending: _Pending, raw: bytes, payloads: Sequence[Buffer]) -> bool:
        sent, pending.tracker = self._connection().send(raw, payloads)
        if self._fds:
            self._look_again()
        return sent

    def _connection(self) -> Dealer | AsyncWire:
        if self._dealer is None:
            if self._options.keys is None and served(self._endpoint):
                self._dealer = AsyncWire(self._endpoint, self._look)
            else:
                self._context = self._context or make_context()
                self._dealer = Dealer(self._context, self._endpoint, self._options.keys)
            self._fds = self._dealer.filenos()
            for fd in self._fds:
                self._loop.add_reader(fd, self._look)
        return self._dealer

    def _look_again(self) -> None:
        """See to it that the socket is looked at again: a send may have swallowed the edge of its descriptor."""
        if not self._look_scheduled:
            self._look_scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._look_scheduled = False
        for _ in range(REPLIES_PER_TURN):
            if self._dealer is None:
                return
            readable, writable = self._dealer.events()
            if writable:
                self._wake_writer()
            if not readable:
                if self._dealer.lost:
                    # All that had come is taken, and no further reply can come.
                    self._reset(ConnectionLostError(f"{self._endpoint}: the gateway closed the connection"))
                return
            self._take(*self._dealer.receive())
        self._look_again()

    def _wake_writer(self) -> None:
        while self._writers:
            turn = self._writers.popleft()
            if not turn.done():
                turn.set_result(None)
                return

    def _take(self, raw: bytes, frames: list[memoryview]) -> None:
        try:
            header = decode_reply(raw)
        except BadReplyError as error:
            # Whose reply this was to be cannot be known: all of them are void.
            self._reset(error)
            return
        pending = None if header.request_id is None else self._pending.get(header.request_id)
        if pending is None or pending.answer.done():
            self.unmatched_replies += 1
            return
        pending.answer.set_result((header, frames))

    def _reset(self, reason: XkvRpcError) -> None:
        """Drop the connection with all that is under way on it; the next call makes a new one."""
        if self._dealer is not None:
            for fd in self._fds:
                self._loop.remove_reader(fd)
            self._dealer.close()
            self._dealer = None
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(reason)
        self._wake_writer()

    async def attach_region(self, size_bytes: int, *, client: str = "xkv-client") -> Region:
        """Make a region of this size and attach it to the gateway.

        Raises:
            RegionRefusedError: The gateway offers none, or refused.
            GatewayUnavailableError: It does not answer.
        """
        path = path_of_regions((await self.hello(client)).regions)
        return await asyncio.to_thread(Region.attach, path, size_bytes)

    async def aclose(self) -> None:
        """Close the connection. Calls that are under way end with `ClientClosedError`."""
        if self._closed:
            return
        self._closed = True
        self._reset(ClientClosedError("the client was closed during the call"))
        if self._context is not None:
            terminate(self._context)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


def _answered(pending: _Pending) -> bool:
    answer = pending.answer
    return answer.done() and not answer.cancelled() and answer.exception() is None
