"""One HTTP connection of the admin port: uvicorn's, with a deadline for whoever talks slowly.

uvicorn waits for a request for as long as its sender likes, and everybody who waits counts for the bound on connections.
So a few dozen clients that send half a request would keep everyone else out, the probe of a supervisor among them.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from xkv_gateway.service.problems import RETRY, error_response

if TYPE_CHECKING:
    import asyncio

    from starlette.types import Receive, Scope, Send

REQUEST_TIMEOUT_S: Final = 5.0
"""For the first byte of a request; and from there to the last one, however they come."""
_BAD_REQUEST: Final = b'{"error":{"code":"bad_request","message":"this is not a valid HTTP request"}}'


async def _crowded(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer where there are more connections than may be."""
    message = "too many connections; try again"
    headers = {**RETRY, "connection": "close"}
    await error_response(HTTPStatus.SERVICE_UNAVAILABLE, message, code="busy", headers=headers)(
        scope, receive, send
    )


class AdminProtocol(H11Protocol):
    """Closes connections whose request is not complete in time, and refuses in JSON, also where there are too many."""

    _request_timer: asyncio.TimerHandle | None = None
    _request_begun = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._served = self.app
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None

    def handle_events(self) -> None:
        """Read what is there; a request beyond the bound is answered, by somebody else."""
        crowded = self._connections_max is not None and len(self.connections) > self._connections_max
        self.app = _crowded if crowded else self._served
        super().handle_events()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the wait."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request; only the last one ends the wait for it."""
        if not self._request_begun:
            self._request_begun = True
            self._end_wait()
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """Begin to wait for the next request, or for the rest of the one that is answered already."""
        self._request_begun = False
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP; once an answer has begun, all that is left is to end the connection."""
        del msg
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            if self.cycle is not None:
                self.cycle.disconnected = True  # what a handler says to the broken request is dropped
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(_BAD_REQUEST)).encode()),
                (b"connection", b"close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(_BAD_REQUEST),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look(self) -> None:
        if self.conn.their_state in {h11.IDLE, h11.SEND_BODY} and not self.transport.is_closing():
            self._expect_request()
        else:
            self._end_wait()

    def _expect_request(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._too_slow)

    def _end_wait(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _too_slow(self) -> None:
        self._request_timer = None
        self.transport.close()
