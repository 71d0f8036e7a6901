"""The admin port: status, health, metrics and the operator's routes over HTTP, as a small ASGI application.

Browsers are kept out: a page of another site can make a browser send requests to 127.0.0.1, under a name of its own
(DNS rebinding), so the Host header must be ours, or under ours, so nothing is changed for a page with another Origin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from xkv_gateway.binds import NO_STORAGE_NETWORKS, is_loopback
from xkv_gateway.service.admin_http import AdminProtocol
from xkv_gateway.service.metrics import CONTENT_TYPE, metrics_page
from xkv_gateway.service.openapi import openapi_document
from xkv_gateway.service.operator_routes import OperatorRoutes
from xkv_gateway.service.problems import error_response
from xkv_gateway.service.router import build_routes, exception_handlers
from xkv_gateway.service.tokens import READING, AuditTrail, TokenCheck, Tokens

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.requests import Request
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

    from xkv_gateway.binds import BindAddress
    from xkv_gateway.networks import StorageNetworks
    from xkv_gateway.service.metrics import AdminSources

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 64
KEEP_ALIVE_S: Final = 5
HEADER_BYTES_MAX: Final = 16 << 10
GRACEFUL_STOP_S: Final = 1


class MetricsRoutes:
    """The handlers of the address that has nothing but metrics and health."""

    def __init__(self, sources: AdminSources) -> None:
        self._sources = sources

    async def healthz(self, _: Request) -> Response:
        """200 as long as the process answers."""
        return JSONResponse({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        """Prometheus text format."""
        return Response(await metrics_page(self._sources), media_type=CONTENT_TYPE)


class AdminRoutes(MetricsRoutes):
    """The handlers; each takes its facts from one snapshot."""

    def __init__(self, sources: AdminSources) -> None:
        super().__init__(sources)
        self._source = sources.status

    async def readyz(self, _: Request) -> Response:
        """200 when the card is online and requests are served, else 503 with the reason."""
        status = self._source.status()
        if status.ready:
            return JSONResponse({"status": "ready"})
        reason = status.card.reason if status.state == "serving" else status.state
        body = {"status": "not ready", "card": status.card.state, "reason": reason}
        return JSONResponse(body, status_code=HTTPStatus.SERVICE_UNAVAILABLE)

    async def status(self, _: Request) -> Response:
        """The whole snapshot."""
        return JSONResponse(self._source.status().to_json())

    async def card(self, _: Request) -> Response:
        """The card's part of it."""
        return JSONResponse(self._source.status().to_json()["card"])

    async def openapi(self, _: Request) -> Response:
        """The OpenAPI document."""
        return JSONResponse(openapi_document())


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(error.status_code, error.detail)
    response.headers.update(error.headers or {})
    return response


class HostCheck:
    """Refuses requests whose Host header is neither a loopback address nor the address that we were told to use.

    So it does with changes on behalf of a page that comes from elsewhere.
    """

    def __init__(self, app: ASGIApp, bind: BindAddress) -> None:
        self._app = app
        self._names = {"localhost", bind.asked.lower(), bind.ip}
        self._any_address = ipaddress.ip_address(bind.ip).is_unspecified

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] != "http":
            return
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        if len(hosts) != 1 or not self._allowed(_host_part(hosts[0])):
            message = "the Host header must be the address of the admin port"
        elif scope["method"] not in READING and not all(origin == f"http://{hosts[0]}" for origin in origins):
            message = "nothing is changed for a web page of another origin"
        else:
            await self._app(scope, receive, send)
            return
        await error_response(HTTPStatus.FORBIDDEN, message)(scope, receive, send)

    def _allowed(self, host: str) -> bool:
        if host in self._names:
            return True
        try:
            # An address cannot be rebound, so that any will do where we listen on all of them.
            return is_loopback(host) or (self._any_address and bool(ipaddress.ip_address(host)))
        except ValueError:
            return False


def _values(scope: Scope, wanted: bytes) -> list[str]:
    """Return the values of a header, as often as it stands."""
    return [value.decode("latin-1") for name, value in scope["headers"] if name == wanted]


def _host_part(header: str) -> str:
    """Return the host of `HOST[:PORT]`, lower case, without brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


async def _internal_error(_: Request, __: Exception) -> Response:
    """Answer 500; starlette raises the error again for `ErrorBoundary`."""
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log has the trace")


class ErrorBoundary:
    """The last resort of an admin request: a bug, already answered with 500, is logged with its trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        try:
            await self._app(scope, receive, send)
        except Exception:
            log.exception("admin request failed")
            response = error_response(
                HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log has the trace"
            )
            await response(scope, receive, send)


class StorageCheck:
    """Refuses whoever comes from, or to, an address of the storage network: a listener on all addresses hears it."""

    def __init__(self, app: ASGIApp, storage: StorageNetworks) -> None:
        self._app = app
        self._storage = storage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        ends = (scope.get("client"), scope.get("server"))
        if scope["type"] == "http" and any(end and self._storage.holds(end[0]) for end in ends):
            message = "not from the storage network"
            await error_response(HTTPStatus.FORBIDDEN, message)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def create_app(
    sources: AdminSources,
    bind: BindAddress | None,
    tokens: Callable[[], Tokens] = Tokens,
    storage: StorageNetworks = NO_STORAGE_NETWORKS,
) -> ASGIApp:
    """Return the application for a listener on `bind`, or on a Unix socket (None), where nobody is asked for a token."""
    operator = OperatorRoutes(sources.administration, sources.clock, sources.meter.renamed)
    app = AuditTrail(_starlette(build_routes(AdminRoutes(sources), operator)))
    return guarded(app, bind, tokens, storage)


def guarded(
    app: ASGIApp,
    bind: BindAddress | None,
    tokens: Callable[[], Tokens] = Tokens,
    storage: StorageNetworks = NO_STORAGE_NETWORKS,
) -> ASGIApp:
    """Return the application behind what is checked on a listener on `bind`, or on a Unix socket (None)."""
    if bind is not None:
        app = open_to_all(HostCheck(TokenCheck(app, tokens, error_response), bind), storage)
    return ErrorBoundary(app)


def open_to_all(app: ASGIApp, storage: StorageNetworks) -> ASGIApp:
    """Return the application without any check but that nobody comes from the storage network."""
    return StorageCheck(app, storage) if storage else app


def create_metrics_app(sources: AdminSources, storage: StorageNetworks = NO_STORAGE_NETWORKS) -> ASGIApp:
    """Return the application for an address that may be reached from anywhere: it only reads, and little."""
    return ErrorBoundary(open_to_all(_starlette(build_routes(MetricsRoutes(sources))), storage))


def _starlette(routes: list[Route]) -> ASGIApp:
    handlers = {**exception_handlers(), HTTPException: _http_error, Exception: _internal_error}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


class _Server(uvicorn.Server):
    """uvicorn inside our loop: the daemon owns the signals."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept, and say so."""
        await super().startup(sockets=sockets)
        self.answers.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class AdminServer:
    """Serves an application on a socket that is bound already. `run` in a task; `stop` ends it."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                http=AdminProtocol,
                loop="none",
                proxy_headers=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACEFUL_STOP_S,
                h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            )
        )

    async def run(self) -> None:
        """Serve until `stop`. The listener is closed in the end."""
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            self._listener.close()

    async def answers(self) -> None:
        """Return once it accepts connections."""
        await self._server.answers.wait()

    def stop(self) -> None:
        """Take no new requests, finish those that run within a second."""
        self._server.should_exit = True
