"""The reverse proxy's side towards vLLM: a connection for each request, bytes passed as they come."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpcore

from xkv_frontend.core.heads import reply_headers, upstream_headers
from xkv_frontend.core.refusal import Code, Refusal
from xkv_frontend.core.routes import Version, parse_version
from xkv_frontend.errors import ConfigError
from xkv_frontend.exchange import Exchange, Outcome, send_within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from xkv_frontend.clock import Clock

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 8192
CONNECT_S: Final = 5.0
WRITE_S: Final = 60.0
POOL_S: Final = 10.0
READ_S_DEFAULT: Final = 3600.0
"""Longest silence of the upstream; a long prefill is silent."""
VERSION_NS: Final = 30_000_000_000
VERSION_BYTES_MAX: Final = 4096
VERSION_S: Final = 5.0


ERRORS: Final[tuple[type[Exception], ...]] = (
    OSError,
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    httpcore.ConnectionNotAvailable,
)
"""What the pool raises when the upstream fails."""


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """Where vLLM is, and how it is spoken to."""

    scheme: bytes
    host: bytes
    port: int
    authorization: bytes | None = None
    """For the upstream, if it has an API key of its own."""
    version: Version | None = None
    """What the operator says; None: asked."""
    read_s: float = READ_S_DEFAULT

    def __repr__(self) -> str:
        return f"UpstreamOptions({self.scheme!r}, {self.host!r}, {self.port})"

    @property
    def host_header(self) -> bytes:
        """The Host header."""
        host = b"[" + self.host + b"]" if b":" in self.host else self.host
        return host + b":" + str(self.port).encode()


def parse_upstream(url: str) -> tuple[bytes, bytes, int]:
    """Return scheme, host and port of `http[s]://HOST[:PORT]`.

    Raises:
        ConfigError: It is not like this; a path, a query or a user is refused too.
    """
    try:
        found = httpcore.URL(url)
        plain = found.target in (b"", b"/") and b"@" not in found.host and found.host and "@" not in url
        default = {b"http": 80, b"https": 443}.get(found.scheme)
    except (ValueError, UnicodeError, httpcore.UnsupportedProtocol):
        plain, default = False, None
    if not plain or default is None:
        raise ConfigError("--upstream must be http://HOST:PORT or https://HOST:PORT")
    return found.scheme, found.host.strip(b"[]"), found.port or default


class _OneShot:
    """A body that is let go of when it has been handed over, so that a long stream does not hold its prompt."""

    def __init__(self, body: list[bytes]) -> None:
        self._body = body

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if self._body:
            yield self._body.pop()


class Upstream:
    """Forwards requests to vLLM."""

    def __init__(self, options: UpstreamOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=ssl.create_default_context() if options.scheme == b"https" else None,
            max_connections=CONNECTIONS_MAX,
            # One request a connection: what an upstream sends too much can never become somebody else's answer, and no
            # request is ever sent into a connection that is just being closed.
            max_keepalive_connections=0,
            http1=True,
            http2=False,
            retries=0,
        )
        self._timeouts = {"connect": CONNECT_S, "read": options.read_s, "write": WRITE_S, "pool": POOL_S}
        self._version: Version | None = options.version
        self._asked_ns: int | None = None

    async def aclose(self) -> None:
        """Close all connections."""
        await self._pool.aclose()

    async def version(self) -> Version | None:
        """Return the version of the running vLLM: stated, or asked at most every 30 s; None where it does not say."""
        if self._options.version is not None:
            return self._options.version
        now_ns = self._clock()
        if self._version is None or self._asked_ns is None or now_ns - self._asked_ns >= VERSION_NS:
            self._version, self._asked_ns = await self._ask_version(), now_ns
        return self._version

    async def _ask_version(self) -> Version | None:
        request = self._request(b"GET", b"/version", [(b"host", self._options.host_header)], None)
        try:
            async with asyncio.timeout(VERSION_S):
                response = await self._pool.handle_async_request(request)
                try:
                    raw = b""
                    async for piece in response.aiter_stream():
                        raw += piece
                        if len(raw) > VERSION_BYTES_MAX:
                            return None
                finally:
                    await response.aclose()
            value = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        except ERRORS:
            return None
        text = value.get("version") if isinstance(value, dict) and response.status == 200 else None
        return parse_version(text) if isinstance(text, str) else None

    def _request(
        self, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]], body: _OneShot | None
    ) -> httpcore.Request:
        options = self._options
        url = httpcore.URL(scheme=options.scheme, host=options.host, port=options.port, target=target)
        return httpcore.Request(
            method, url, headers=headers, content=body, extensions={"timeout": self._timeouts}
        )

    async def forward(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:  # noqa: ARG002 - Forwarder's signature
        """Send the request, and pass the answer on as it comes.

        Raises:
            Refusal: The upstream cannot be reached, breaks off before it answers, or redirects.
            TimeoutError: The client takes nothing any more.
        """
        assert exchange.route is not None
        assert exchange.head is not None
        body_bytes = len(exchange.body[0]) if exchange.body else None
        headers = upstream_headers(
            self._options.host_header,
            exchange.head,
            exchange.id.encode(),
            body_bytes,
            self._options.authorization,
        )
        request = self._request(
            exchange.route.method.encode(),
            exchange.route.path,
            headers,
            _OneShot(exchange.body) if exchange.body else None,
        )
        try:
            response = await self._pool.handle_async_request(request)
        except ERRORS as error:
            self._asked_ns = None
            raise _refusal(error) from None
        try:
            await _pass_on(response, exchange, send)
        finally:
            await response.aclose()


async def _pass_on(response: httpcore.Response, exchange: Exchange, send: Send) -> None:
    if 300 <= response.status < 400 and response.status != 304:
        raise Refusal(Code.UPSTREAM_FAILED, "the upstream redirects")
    headers = reply_headers(response.headers, exchange.id.encode())
    await send_within(send, {"type": "http.response.start", "status": response.status, "headers": headers})
    try:
        async for piece in response.aiter_stream():
            await send_within(send, {"type": "http.response.body", "body": piece, "more_body": True})
    except ERRORS as error:
        # The answer stays without its end: the server closes the connection, so that the client knows.
        log.warning("request %s: the upstream broke off: %s", exchange.id, type(error).__name__)
        exchange.outcome = Outcome.TRUNCATED
        return
    await send_within(send, {"type": "http.response.body", "body": b"", "more_body": False})


_REFUSALS: Final[tuple[tuple[type[Exception], Code, str], ...]] = (
    (httpcore.ConnectError, Code.UPSTREAM_UNREACHABLE, "the model server cannot be reached"),
    (httpcore.ConnectTimeout, Code.UPSTREAM_UNREACHABLE, "the model server cannot be reached"),
    (httpcore.PoolTimeout, Code.BUSY, "too many requests are running"),
    (httpcore.ReadTimeout, Code.UPSTREAM_TIMEOUT, "the model server does not answer"),
    (httpcore.WriteTimeout, Code.UPSTREAM_TIMEOUT, "the model server does not take the request"),
)


def _refusal(error: Exception) -> Refusal:
    """Return the answer for an upstream that did not answer; its address and the reason stay in the log."""
    log.warning("the upstream failed before it answered: %s", type(error).__name__)
    for kind, code, message in _REFUSALS:
        if isinstance(error, kind):
            return Refusal(code, message)
    return Refusal(Code.UPSTREAM_FAILED, "the model server broke off")
