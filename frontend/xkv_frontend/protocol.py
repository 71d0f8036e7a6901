"""uvicorn's HTTP/1.1 protocol (h11) with what it lacks for clients that are not trusted.

- A head that does not arrive in time ends the connection, whether it comes slowly or not at all.
- One request at a time: what a client sends behind a request before that is answered is dropped, and the connection ends with the
  answer. So a body that is longer than announced never becomes a request, and a client that goes away is always noticed.
- Requests that cannot be read, or are on one connection too many, are answered in JSON.
- An answer that broke off ends with a reset where only the end of the connection tells the end of the answer (HTTP/1.0).
"""

from __future__ import annotations

import json
import socket
import struct
from typing import TYPE_CHECKING, Any, Final, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from xkv_frontend.core.refusal import Code, Refusal, retry_after

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

HEAD_TIMEOUT_S: Final = 10.0
HEAD_BYTES_MAX: Final = 64 << 10
_AT_ONCE: Final = struct.pack("ii", 1, 0)
_BAD: Final = b'{"error": {"message": "the request cannot be read as HTTP", "type": "xkv_frontend", "code": "bad_framing"}}'


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001 - an application's signature
    """Answer where there are more connections than may be."""
    refusal = Refusal(Code.BUSY, "too many connections; try again")
    raw = json.dumps(refusal.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
        (b"connection", b"close"),
        *retry_after(1),
    ]
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})


class _Resetting:
    """A transport for one answer. Closed before the answer is complete, it resets the connection."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        self._transport = transport
        self._cycle = cycle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Send what is left, and close."""
        if self._cycle.response_started and not self._cycle.response_complete:
            own = self._transport.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        self._transport.close()


class FrontProtocol(H11Protocol):
    """One connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._served = self.app
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn does
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read what came, unless the connection only waits for its last answer."""
        if not self._closing:
            super().data_received(data)

    def handle_events(self) -> None:
        """Read what is there; then see whether a head is on its way, or something came too early."""
        crowded = self._connections_max is not None and len(self.connections) > self._connections_max
        self.app = _crowded if crowded else self._served
        super().handle_events()
        if self.transport.is_closing():
            self._disarm()
            return
        if self.conn.their_state is h11.IDLE:
            if self.conn.trailing_data[0]:
                self._arm()
            return
        self._disarm()
        if self.cycle is not None and self.scope["http_version"] == "1.0":
            self.cycle.transport = cast("asyncio.Transport", _Resetting(self.transport, self.cycle))
        running = self.cycle is not None and not self.cycle.response_complete
        if running and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self._closing = True
            self.cycle.keep_alive = False
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, and close."""
        del msg
        self._closing = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_BAD)).encode()),
                (b"connection", b"close"),
            ]
            answer: tuple[h11.Event, ...] = (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=_BAD),
                h11.EndOfMessage(),
            )
            for event in answer:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _arm(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _disarm(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
