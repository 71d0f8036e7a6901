"""One connection to the upstream for one request: h11 says what the bytes mean, asyncio moves them.

Nothing is shared between requests, so that what an upstream sends too much can never become somebody else's answer. Bytes are
taken from the socket only as fast as they are passed on, and everything that has come is passed on in one piece.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Final, Self, cast

import h11

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

CONNECT_S: Final = 5.0
UNREAD_BYTES_MAX: Final = 256 << 10
"""Beyond this nothing is read from the socket until it has been passed on."""
HEAD_BYTES_MAX: Final = 64 << 10
JOIN_BYTES_MAX: Final = 64 << 10
INFORMATIONAL_MAX: Final = 64
"""Answers that only announce the answer (1xx)."""
STATUS_MAX: Final = 599
_LENGTHS: Final = frozenset({b"content-length", b"transfer-encoding"})


class Fault(Enum):
    """What went wrong with an upstream."""

    UNREACHABLE = auto()
    BROKE_OFF = auto()
    """It closed the connection, or did not speak HTTP."""
    SILENT = auto()


class UpstreamError(Exception):
    """The upstream failed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.name.lower())
        self.fault = fault


def _checked(answer: h11.Response) -> tuple[int, list[tuple[bytes, bytes]]]:
    """Return status and headers of an answer.

    Raises:
        UpstreamError: There is no such status, or the length is told in two ways: it is not clear where the answer ends.
    """
    headers = [*answer.headers]
    if answer.status_code > STATUS_MAX or {name for name, _ in headers} >= _LENGTHS:
        raise UpstreamError(Fault.BROKE_OFF)
    return answer.status_code, headers


class Link(asyncio.Protocol):
    """A connection, from opening it to the end of the answer. As a context manager it closes itself, whatever happens."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._loop.time()
        self._unread = 0
        self._paused = False
        self._fault: Fault | None = None

    async def open(self, host: str, port: int, context: ssl.SSLContext | None) -> None:
        """Connect.

        Raises:
            UpstreamError: `UNREACHABLE`.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._loop.create_connection(
                    lambda: self, host, port, ssl=context, server_hostname=host if context else None
                )
        except (OSError, UnicodeError):  # TimeoutError is an OSError
            raise UpstreamError(Fault.UNREACHABLE) from None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Hand bytes to h11; stop reading when too many wait."""
        self._heard = self._loop.time()
        self._http.receive_data(data)
        self._unread += len(data)
        if self._unread > UNREAD_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> bool:
        """Tell h11 that the upstream has finished: for some answers that is their end."""
        self._http.receive_data(b"")
        self._wake()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Whatever was to come does not come any more."""
        self._fault = self._fault or (Fault.BROKE_OFF if exc is not None else None)
        self._transport = None
        self._wake()

    async def ask(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: list[bytes]
    ) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Send a request, and return status and headers (names in lower case) of the answer.

        The body is taken out of its list when it is sent, so that nothing holds it while the answer comes.

        Raises:
            UpstreamError: No answer.
        """
        assert self._transport is not None
        self._timer = self._loop.call_later(self._silence_s, self._look)
        head = self._http.send(h11.Request(method=method, target=target, headers=headers))
        assert head is not None
        if body:
            data = self._http.send(h11.Data(data=body.pop()))
            assert data is not None
            if len(data) <= JOIN_BYTES_MAX:
                head += data  # one packet to send instead of two
            else:
                self._transport.write(head)
                head = data
            del data
        self._transport.write(head)
        del head
        self._http.send(h11.EndOfMessage())
        for _ in range(INFORMATIONAL_MAX):
            event = await self._event()
            if isinstance(event, h11.Response):
                return _checked(event)
            if not isinstance(event, h11.InformationalResponse):
                break
        raise UpstreamError(Fault.BROKE_OFF)

    async def piece(self) -> bytes:
        """Return all of the body that has come, at least one byte; `b""` is its end.

        Raises:
            UpstreamError: It ends too early.
        """
        event = await self._event()
        if not isinstance(event, h11.Data):
            return b""
        pieces = [event.data]
        while (further := self._try_event()) is not None:
            if not isinstance(further, h11.Data):
                # The end: h11 tells it again when asked, since nothing follows it.
                break
            pieces.append(further.data)
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return bytes(pieces[0]) if len(pieces) == 1 else b"".join(pieces)

    def _try_event(self) -> Any:
        """Return the next event that the bytes so far make, None where more are needed or none are left."""
        if self._http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
            return None
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            # Told when the pieces before it have been passed on.
            self._fault = self._fault or Fault.BROKE_OFF
            return None
        return None if event is h11.NEED_DATA or event is h11.PAUSED else event

    async def _event(self) -> Any:
        while True:
            event = self._try_event()
            if event is not None:
                return event
            if self._http.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
                return h11.EndOfMessage()
            if self._fault is not None or self._transport is None:
                raise UpstreamError(self._fault or Fault.BROKE_OFF)
            self._unread = 0
            if self._paused:
                self._paused = False
                self._transport.resume_reading()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _look(self) -> None:
        """See whether the upstream has been silent for too long while it was listened to."""
        silent_s = self._loop.time() - self._heard
        if silent_s >= self._silence_s and not self._paused:
            self._fault = self._fault or Fault.SILENT
            self._wake()
            return
        self._timer = self._loop.call_later(max(1.0, self._silence_s - silent_s), self._look)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
