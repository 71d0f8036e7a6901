"""The front end as an ASGI application: everything that is decided about a request, before and after it is forwarded.

What forwarding is, is the one difference between the two shapes: the reverse proxy sends the request to an upstream
(`upstream.py`), the middleware hands it to the application that it wraps (`middleware.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from xkv_frontend.auth import Authenticator, Caller
from xkv_frontend.core.heads import check_json_type, read_head
from xkv_frontend.core.jsonstrict import parse_object, write_object
from xkv_frontend.core.limits import BodyBudget, Limiter
from xkv_frontend.core.refusal import Code, Refusal
from xkv_frontend.core.rewrite import rewrite
from xkv_frontend.core.routes import Route, Version, check_version, find_route
from xkv_frontend.exchange import (
    SEND_STALL_NS,
    ClientGoneError,
    Exchange,
    Lifeline,
    Outcome,
    linger,
    path_text,
    read_body,
)

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from xkv_frontend.accesslog import AccessLog
    from xkv_frontend.clock import Clock, Entropy
    from xkv_frontend.core.names import TenantName
    from xkv_frontend.core.policy import Policy
    from xkv_frontend.core.salt import Salter
    from xkv_frontend.metrics import Metrics

log = logging.getLogger(__name__)

IN_FLIGHT_MAX: Final = 8192
REFRESH_NS: Final = 1_000_000_000
HEALTH_PATH: Final = b"/healthz"


class Forwarder(Protocol):
    """Where an admitted request goes."""

    async def version(self) -> Version | None:
        """Return the version of vLLM behind, None where it is not known."""
        ...

    async def forward(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Answer the request. `receive` only tells when the client goes away."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What a front end is made of."""

    policy: Policy
    salter: Salter
    authenticator: Authenticator
    metrics: Metrics
    access_log: AccessLog
    clock: Clock
    entropy: Entropy


class Front:
    """The ASGI application."""

    def __init__(self, parts: Parts, forwarder: Forwarder) -> None:
        self._parts = parts
        self._forwarder = forwarder
        self._limiter = Limiter(IN_FLIGHT_MAX)
        self._budget = BodyBudget()
        self._routes_off = parts.policy.routes_off
        self._running: dict[str, set[Lifeline]] = {}
        self._id_prefix = parts.entropy(6).hex()
        self._count = 0
        self._refreshed_ns = parts.clock()
        self.draining = False
        """Set when the process is about to end: new requests are refused."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Whatever goes wrong inside ends here."""
        if scope["type"] != "http":
            return
        if scope.get("raw_path") == HEALTH_PATH and scope["method"] == "GET":
            await send_json(send, 200, {"status": "draining" if self.draining else "ok"})
            return
        self._count += 1
        exchange = Exchange(f"{self._id_prefix}-{self._count:x}", self._parts.clock())
        try:
            await self._serve(scope, exchange, receive, send)
        except Refusal as refusal:
            await self._refuse(refusal, exchange, receive, send)
        except ClientGoneError:
            exchange.outcome = Outcome.CLIENT_GONE
        except Exception as error:
            log.exception("request %s failed", exchange.id, exc_info=_without_secrets(error))
            exchange.outcome = Outcome.FAILED
            if not exchange.response_started:
                answer = Refusal(Code.INTERNAL, "internal error; the log has the trace")
                await self._refuse(answer, exchange, receive, send)
                exchange.outcome = Outcome.FAILED
        finally:
            self._account(scope, exchange)

    async def _serve(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:
        parts = self._parts
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        exchange.head = read_head(headers)
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode("utf-8", "surrogatepass")
        exchange.route = route = find_route(scope["method"], raw_path, self._routes_off)
        peer = scope["client"][0] if scope.get("client") else None
        caller = Caller(headers, peer, scope["method"], path_text(scope))
        exchange.identity = identity = await parts.authenticator.identify(caller)
        if self.draining:
            raise Refusal(Code.DRAINING, "shutting down", headers=((b"connection", b"close"),))
        if route.ask_version is not None:
            check_version(route, await self._forwarder.version())
        rules = parts.policy.tenant(identity.tenant)
        self._limiter.take(identity.tenant, rules, parts.clock())
        parts.metrics.began(identity.tenant)
        try:
            if route.has_body:
                check_json_type(exchange.head)
                self._admit(
                    route,
                    exchange,
                    await read_body(receive, exchange, parts.policy.body_bytes_max, self._budget),
                )
            elif exchange.head.has_body:
                raise Refusal(Code.BAD_FRAMING, "this route takes no body")
            await self._forward(scope, exchange, receive, send)
        finally:
            parts.metrics.released(identity.tenant)
            self._limiter.give_back(identity.tenant)

    def _admit(self, route: Route, exchange: Exchange, raw: bytes) -> None:
        """Turn the client's body into the upstream's; both are large, so that neither is kept in a frame."""
        assert exchange.identity is not None
        parts = self._parts
        rewritten = rewrite(
            route, parse_object(raw), exchange.identity, parts.policy, parts.salter, parts.entropy
        )
        exchange.scope = rewritten.decision.scope.value
        exchange.stream = rewritten.stream
        exchange.body.append(write_object(rewritten.body))

    async def _forward(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:
        assert exchange.identity is not None
        credential = exchange.identity.credential
        lifeline = Lifeline(receive)
        running = self._running.setdefault(credential, set())
        running.add(lifeline)
        try:
            async with lifeline:
                await self._forwarder.forward(
                    scope, exchange, receive, self._counted(exchange, lifeline, send)
                )
        finally:
            running.discard(lifeline)
            if not running and self._running.get(credential) is running:
                del self._running[credential]
        if lifeline.ended is not None:
            exchange.outcome = lifeline.ended
            if lifeline.ended is Outcome.REVOKED and not exchange.response_started:
                raise Refusal(Code.UNAUTHORIZED, "a valid API key is needed")

    def _counted(self, exchange: Exchange, lifeline: Lifeline, send: Send) -> Send:
        clock = self._parts.clock

        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            else:
                body = message.get("body", b"")
                if exchange.first_ns is None and body:
                    exchange.first_ns = clock()
                exchange.sent_bytes += len(body)
                lifeline.answered = not message.get("more_body", False)
            lifeline.sending_since_ns = clock()
            await send(message)
            lifeline.sending_since_ns = None

        return counted

    async def _refuse(self, refusal: Refusal, exchange: Exchange, receive: Receive, send: Send) -> None:
        """Answer with the refusal; a connection with a body that nobody reads is closed after it."""
        exchange.outcome, exchange.code = Outcome.REFUSED, refusal.code.value
        self._parts.metrics.refused(refusal.code.value)
        exchange.status = refusal.status
        unread = exchange.head is None or (exchange.head.has_body and not exchange.body_read)
        headers = [*refusal.headers, (b"x-request-id", exchange.id.encode())]
        if unread and (b"connection", b"close") not in headers:
            headers.append((b"connection", b"close"))
        if not unread or exchange.head is None or exchange.head.expects_continue:
            await send_json(send, refusal.status, refusal.body(), headers)
            return
        await send_json(send, refusal.status, refusal.body(), headers, more=True)
        await linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _account(self, scope: Scope, exchange: Exchange) -> None:
        parts = self._parts
        route = exchange.route.name.value if exchange.route else "none"
        tenant = exchange.identity.tenant if exchange.identity else None
        first_s = None if exchange.first_ns is None else (exchange.first_ns - exchange.began_ns) / 1e9
        parts.metrics.ended(
            tenant,
            route,
            exchange.status,
            exchange.outcome.value,
            sent=exchange.sent_bytes,
            received=exchange.received_bytes,
            first_s=None if exchange.outcome is Outcome.REFUSED else first_s,
        )
        parts.access_log.write(exchange, scope["method"], parts.clock())

    def refresh(self) -> None:
        """End what runs with revoked credentials, and what goes to clients that take nothing. To be called about once a second."""
        gone = self._parts.authenticator.refresh()
        now_ns = self._parts.clock()
        for lifeline in [one for lifelines in self._running.values() for one in lifelines]:
            since_ns = lifeline.sending_since_ns
            if since_ns is not None and now_ns - since_ns > SEND_STALL_NS:
                lifeline.end(Outcome.STALLED)
        for credential in gone & self._running.keys():
            for lifeline in list(self._running[credential]):
                lifeline.end(Outcome.REVOKED)

    def refresh_if_due(self) -> None:
        """Call `refresh` if that was not done for a second: for those who have no task that does."""
        now_ns = self._parts.clock()
        if now_ns - self._refreshed_ns >= REFRESH_NS:
            self._refreshed_ns = now_ns
            self.refresh()

    def tenants_running(self, tenant: TenantName) -> int:
        """Return how many requests of a tenant run."""
        return self._limiter.in_flight_of(tenant)

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._limiter.in_flight


def _without_secrets(error: Exception) -> Exception:
    """Cut off what an error was caused by: contexts of foreign errors may quote bodies."""
    error.__context__ = error.__cause__ = None
    return error


async def send_json(
    send: Send,
    status: int,
    body: dict[str, Any],
    headers: list[tuple[bytes, bytes]] | None = None,
    *,
    more: bool = False,
) -> None:
    """Send an answer of ours; with `more` its end is left open, though its length is told."""
    raw = json.dumps(body).encode()
    own = [(b"content-type", b"application/json"), (b"content-length", str(len(raw)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *(headers or [])]})
    await send({"type": "http.response.body", "body": raw, "more_body": more})


async def refresh_for_ever(front: Front, interval_s: float = 1.0) -> None:
    """Call `refresh` again and again."""
    while True:
        await asyncio.sleep(interval_s)
        front.refresh()
