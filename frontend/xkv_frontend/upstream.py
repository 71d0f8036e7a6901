"""The reverse proxy's side towards vLLM: a connection for each request, bytes passed as they come."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from xkv_frontend.core.heads import reply_headers, upstream_headers
from xkv_frontend.core.refusal import Code, Refusal
from xkv_frontend.core.routes import Version, parse_version
from xkv_frontend.errors import ConfigError
from xkv_frontend.exchange import Exchange, Outcome
from xkv_frontend.link import Fault, Link, UpstreamError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from xkv_frontend.clock import Clock

log = logging.getLogger(__name__)

PORTS: Final = {"http": 80, "https": 443}
READ_S_DEFAULT: Final = 3600.0
"""Longest silence of the upstream; a long prefill is silent."""
VERSION_NS: Final = 30_000_000_000
VERSION_BYTES_MAX: Final = 4096
VERSION_S: Final = 5.0


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
        found = urlsplit(url)
        host, port = (found.hostname or "").encode("ascii"), found.port
    except ValueError:  # UnicodeEncodeError is one
        host, port, found = b"", None, urlsplit("")
    rest = (found.path in ("", "/"), not found.query, not found.fragment, "@" not in found.netloc)
    if not host or not all(rest) or found.scheme not in PORTS:
        raise ConfigError("--upstream must be http://HOST:PORT or https://HOST:PORT")
    return found.scheme.encode(), host, port or PORTS[found.scheme]


class Upstream:
    """Forwards requests to vLLM."""

    def __init__(self, options: UpstreamOptions, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._host = options.host.decode("ascii")
        self._ssl = ssl.create_default_context() if options.scheme == b"https" else None
        self._version: Version | None = options.version
        self._asked_ns: int | None = None

    async def version(self) -> Version | None:
        """Return the version of the running vLLM: stated, or asked at most every 30 s; None where it does not say."""
        if self._options.version is not None:
            return self._options.version
        now_ns = self._clock()
        if self._version is None or self._asked_ns is None or now_ns - self._asked_ns >= VERSION_NS:
            self._version, self._asked_ns = await self._ask_version(), now_ns
        return self._version

    async def _ask_version(self) -> Version | None:
        headers = [(b"host", self._options.host_header), (b"connection", b"close")]
        raw = b""
        try:
            async with asyncio.timeout(VERSION_S), Link(VERSION_S) as link:
                await link.open(self._host, self._options.port, self._ssl)
                status, _ = await link.ask(b"GET", b"/version", headers, [])
                while piece := await link.piece():
                    raw += piece
                    if len(raw) > VERSION_BYTES_MAX:
                        return None
            value = json.loads(raw)
        except (UpstreamError, TimeoutError, ValueError, RecursionError):
            return None
        text = value.get("version") if isinstance(value, dict) and status == HTTPStatus.OK else None
        return parse_version(text) if isinstance(text, str) else None

    async def forward(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:  # noqa: ARG002 - Forwarder's signature
        """Send the request, and pass the answer on as it comes.

        Raises:
            Refusal: The upstream cannot be reached, breaks off before it answers, or redirects.
        """
        assert exchange.route is not None
        assert exchange.head is not None
        options = self._options
        body_bytes = len(exchange.body[0]) if exchange.body else None
        headers = upstream_headers(
            options.host_header, exchange.head, exchange.id.encode(), body_bytes, options.authorization
        )
        async with Link(options.read_s) as link:
            try:
                await link.open(self._host, options.port, self._ssl)
                status, found = await link.ask(
                    exchange.route.method.encode(), exchange.route.path, headers, exchange.body
                )
            except UpstreamError as error:
                self._asked_ns = None
                log.warning("request %s: the upstream failed: %s", exchange.id, error)
                code, message = REFUSALS[error.fault]
                raise Refusal(code, message) from None
            await _pass_on(link, status, found, exchange, send)


async def _pass_on(
    link: Link, status: int, headers: list[tuple[bytes, bytes]], exchange: Exchange, send: Send
) -> None:
    if status in REDIRECTS:
        raise Refusal(Code.UPSTREAM_FAILED, "the upstream redirects")
    kept = reply_headers(status, headers, exchange.id.encode())
    await send({"type": "http.response.start", "status": status, "headers": kept})
    try:
        while piece := await link.piece():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except UpstreamError as error:
        # The answer stays without its end: the server closes the connection, so that the client knows.
        log.warning("request %s: the upstream broke off: %s", exchange.id, error)
        exchange.outcome = Outcome.TRUNCATED
        return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


REDIRECTS: Final = frozenset(range(300, 400)) - {304}
REFUSALS: Final[dict[Fault, tuple[Code, str]]] = {
    Fault.UNREACHABLE: (Code.UPSTREAM_UNREACHABLE, "the model server cannot be reached"),
    Fault.BROKE_OFF: (Code.UPSTREAM_FAILED, "the model server broke off"),
    Fault.SILENT: (Code.UPSTREAM_TIMEOUT, "the model server does not answer"),
}
"""The answer for an upstream that did not answer; its address stays in the log."""
