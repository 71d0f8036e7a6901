"""The clients: `Client` blocks, for inference engines; `AsyncClient` has many calls in flight on one connection."""

from __future__ import annotations

import itertools
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from xkv_rpc.async_client import AsyncClient
from xkv_rpc.client_calls import BlockingCalls
from xkv_rpc.client_codec import LoadResult, ReplyHeader, decode_reply, encode_request, parse_reply
from xkv_rpc.errors import (
    BadReplyError,
    ClientClosedError,
    ConnectionLostError,
    GatewayUnavailableError,
    TooManyCallsError,
)
from xkv_rpc.messages import Ping, Reply, Request
from xkv_rpc.pool import Pool
from xkv_rpc.region_client import Region, path_of_regions
from xkv_rpc.session import Breaker, BreakerState, ClientOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from xkv_rpc.calls import Buffer

__all__ = ["AsyncClient", "Client", "ClientOptions", "LoadResult", "Region"]

_NS_PER_MS: Final = 1_000_000


class Client(BlockingCalls):
    """A blocking client. Threads may share it: each call has a connection of its own while it lasts.

    After a call without an answer, further calls fail in microseconds until a probe (a ping, with backoff) is answered. A
    process that was forked has a client of its own in the same object; it shares nothing with its parent's.
    """

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
        self._closed = False
        self._start()

    def _start(self) -> None:
        options = self._options
        self._pid = os.getpid()
        self._pool = Pool(self._endpoint, options.connections_max, self._clock, options.keys)
        self._breaker = Breaker(
            backoff_min_ns=options.backoff_min_ms * _NS_PER_MS,
            backoff_max_ns=options.backoff_max_ms * _NS_PER_MS,
        )
        self._breaker_lock = threading.Lock()
        # Ids begin anywhere, so that a reply to somebody else's request never looks like one to ours.
        self._ids = itertools.count(secrets.randbits(62))

    def call(
        self, request: Request, payloads: Sequence[Buffer] = (), *, timeout_ms: int | None = None
    ) -> tuple[Reply, list[memoryview]]:
        """Send a request and wait for its reply and payloads. See `BlockingCalls` for what it raises."""
        if os.getpid() != self._pid:
            # The parent's connections and locks are of no use here.
            self._pool.forget()
            self._start()
        if self._closed:
            raise ClientClosedError("the client is closed")
        now_ns = self._clock()
        deadline_ns = now_ns + (self._options.timeout_ms if timeout_ms is None else timeout_ms) * _NS_PER_MS
        if self._breaker.state is not BreakerState.CLOSED:
            self._probe(now_ns, deadline_ns)
        header, frames = self._guarded(request, payloads, deadline_ns)
        return parse_reply(request, header), frames

    def _probe(self, now_ns: int, deadline_ns: int) -> None:
        """Fail at once while the circuit is open; when a probe is due, be the one who makes it."""
        with self._breaker_lock:
            if not self._breaker.admit(now_ns):
                return
        probe_deadline_ns = now_ns + self._options.probe_timeout_ms * _NS_PER_MS
        self._guarded(Ping(), (), min(probe_deadline_ns, deadline_ns), probing=True)

    def _guarded(
        self, request: Request, payloads: Sequence[Buffer], deadline_ns: int, *, probing: bool = False
    ) -> tuple[ReplyHeader, list[memoryview]]:
        """Exchange, and tell the breaker how it went. An error reply is an answer like any other."""
        answered: bool | None = None
        try:
            answer = self._exchange(request, payloads, deadline_ns)
            answered = True
        except TooManyCallsError:
            raise  # our own crowd says nothing about the gateway
        except (GatewayUnavailableError, BadReplyError):
            answered = False
            raise
        finally:
            if answered is None and probing:
                answered = False  # who probes must say something
            if answered is False or (answered and self._breaker.state is not BreakerState.CLOSED):
                with self._breaker_lock:
                    if answered:
                        self._breaker.succeeded()
                    else:
                        self._breaker.failed(self._clock())
        return answer

    def _exchange(
        self, request: Request, payloads: Sequence[Buffer], deadline_ns: int
    ) -> tuple[ReplyHeader, list[memoryview]]:
        request_id = next(self._ids)
        raw = encode_request(request_id, request)
        wire = self._pool.acquire(deadline_ns, self._options.connect_timeout_ms * _NS_PER_MS)
        answered = False
        try:
            wire.send(raw, payloads, deadline_ns)
            while True:
                raw_reply, frames = wire.receive(deadline_ns)
                header = decode_reply(raw_reply)
                # A reply without id says that a request was unreadable; only ours is on this connection.
                if header.request_id is None or header.request_id == request_id:
                    answered = True
                    return header, frames
        except ConnectionLostError:
            if self._closed:
                raise ClientClosedError("the client was closed during the call") from None
            raise
        finally:
            if answered:
                self._pool.release(wire)
            else:
                # A late reply dies with the connection, and so does what has not been sent of the request.
                self._pool.discard(wire)

    def attach_region(self, size_bytes: int, *, client: str = "xkv-client") -> Region:
        """Make a region of this size and attach it to the gateway.

        Raises:
            RegionRefusedError: The gateway offers none, or refused.
            GatewayUnavailableError: It does not answer.
        """
        path = self.hello(client).regions
        return Region.attach(path_of_regions(path), size_bytes)

    def close(self) -> None:
        """Close all connections. Calls of other threads end with `ClientClosedError`."""
        self._closed = True
        if os.getpid() == self._pid:
            self._pool.close()
        else:
            self._pool.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
