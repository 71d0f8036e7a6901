"""The front end around an application in the same process: a FastAPI or Starlette application, or vLLM's own server.

    app.add_middleware(FrontMiddleware, parts=build_parts(settings), allow=frozenset({b"/health"}))

Or, for vLLM's `--middleware`, which takes a class and no arguments: `xkv_frontend.middleware.EnvironmentMiddleware`, with the
options of `xkv-frontend serve` as variables (`XKV_FRONTEND_DEPLOYMENT`, `XKV_FRONTEND_KEYS_FILE`, ...).
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final

from xkv_frontend.core.heads import upstream_headers
from xkv_frontend.front import Front, Parts
from xkv_frontend.settings import FrontSettings, build_parts

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from xkv_frontend.core.routes import Version
    from xkv_frontend.exchange import Exchange

IDENTITY_KEY: Final = "xkv_identity"
"""Where the inner application finds the identity: `scope["state"][IDENTITY_KEY]`."""


class InnerApp:
    """Forwards to an application in this process: a head of our own, the body written anew."""

    def __init__(self, app: ASGIApp, version: Version | None) -> None:
        self._app = app
        self._version = version

    async def version(self) -> Version | None:
        """Return what the operator says: there is nobody to ask."""
        return self._version

    async def forward(self, scope: Scope, exchange: Exchange, receive: Receive, send: Send) -> None:  # noqa: ARG002 - Forwarder's signature
        """Call the application."""
        assert exchange.head is not None
        assert exchange.route is not None
        body = exchange.body.pop() if exchange.body else b""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost")
        length = len(body) if exchange.route.has_body else None
        state = {**scope.get("state", {}), IDENTITY_KEY: exchange.identity}
        inner = {
            **scope,
            "headers": upstream_headers(host, exchange.head, exchange.id.encode(), length, None),
            "query_string": b"",
            "state": state,
        }
        await self._app(inner, _BodyThenSilence(body), _sender(exchange, send))


class _BodyThenSilence:
    """The `receive` of the application: the body once; then nothing, since `Lifeline` cancels it when the client goes away."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


def _sender(exchange: Exchange, send: Send) -> Send:
    async def sender(message: Any) -> None:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), (b"x-request-id", exchange.id.encode())]
            message = {**message, "headers": headers}
        await send(message)

    return sender


class FrontMiddleware:
    """ASGI middleware. What is not on the allow-list of routes does not reach the application, except paths in `allow`."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        parts: Parts,
        allow: frozenset[bytes] = frozenset(),
        version: Version | None = None,
    ) -> None:
        self._app = app
        self._allow = allow
        self.front = Front(parts, InnerApp(app, version))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; the life of the application goes on as without us, WebSockets are closed."""
        if scope["type"] == "lifespan" or (scope["type"] == "http" and scope.get("raw_path") in self._allow):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            self.front.refresh_if_due()
            await self.front(scope, receive, send)


class EnvironmentMiddleware(FrontMiddleware):
    """The same with settings from the environment; wrong settings end the start of the application."""

    def __init__(self, app: ASGIApp) -> None:
        settings = FrontSettings.from_environment(os.environ)
        super().__init__(
            app,
            parts=build_parts(settings, os.environ),
            allow=frozenset({b"/health"}),
            version=settings.vllm_version,
        )
