"""`xkv-frontend serve`: two listeners, signals, readiness, and an end in order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from xkv_frontend.errors import AddressInUseError, ConfigError, ExitCode
from xkv_frontend.front import Front, refresh_for_ever
from xkv_frontend.metrics import CONTENT_TYPE, Metrics
from xkv_frontend.notify import READY, STOPPING, keep_alive, notify
from xkv_frontend.protocol import HEAD_BYTES_MAX, FrontProtocol
from xkv_process.signals import listening
from xkv_rpc.addresses import host_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.requests import Request
    from starlette.types import ASGIApp

BACKLOG: Final = 1024
CONNECTIONS_MAX_DEFAULT: Final = 8192
KEEP_ALIVE_S: Final = 30
DRAIN_S_DEFAULT: Final = 20.0
LAST_S: Final = 1
"""What runs after the draining time is called off so much later."""
CLEAN_UP_S: Final = 2.0
LOOK_S: Final = 0.02
"""Between two looks at whether all streams have ended."""
METRICS_CONNECTIONS_MAX: Final = 64


def bind(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket.

    Raises:
        AddressInUseError: Somebody listens there.
        ConfigError: Any other reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError):
        raise ConfigError(f"{option}: cannot resolve {host!r}", advice="Write an IP address.") from None
    listener = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        text = f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(text, advice=f"Choose another one with {option}.") from None
        raise ConfigError(text) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return `HOST:PORT` of a listener."""
    return host_port(*listener.getsockname()[:2])


def metrics_app(metrics: Metrics, front: Front) -> ASGIApp:
    """Return the application of the metrics port."""

    async def scrape(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "draining" if front.draining else "ok", "running": front.running})

    return Starlette(routes=[Route("/metrics", scrape), Route("/healthz", health)])


class _Server(uvicorn.Server):
    """uvicorn inside our loop: the signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


def make_server(app: ASGIApp, *, connections_max: int, protocol: type[asyncio.Protocol]) -> _Server:
    """Return a server for an application."""
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        http=protocol,
        loop="none",
        proxy_headers=False,
        server_header=False,
        limit_concurrency=connections_max,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_S,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        backlog=BACKLOG,
    )
    return _Server(config)


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound before anything else starts."""

    front: socket.socket
    metrics: socket.socket | None


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that `run` serves."""

    front: Front
    metrics: Metrics
    listeners: Listeners
    connections_max: int = CONNECTIONS_MAX_DEFAULT
    drain_s: float = DRAIN_S_DEFAULT

    async def run(self, on_serving: Callable[[], None]) -> ExitCode:
        """Serve until SIGTERM or SIGINT; streams that run get `drain_s` to end, a second signal ends them at once.

        Until they have ended, who comes is still answered: that this one is shutting down.
        """
        server = make_server(self.front, connections_max=self.connections_max, protocol=FrontProtocol)
        servers = [(server, self.listeners.front)]
        if self.listeners.metrics is not None:
            scrape = make_server(
                metrics_app(self.metrics, self.front),
                connections_max=METRICS_CONNECTIONS_MAX,
                protocol=FrontProtocol,
            )
            servers.append((scrape, self.listeners.metrics))
        stopping, forced = asyncio.Event(), asyncio.Event()
        helpers = [
            asyncio.create_task(refresh_for_ever(self.front)),
            asyncio.create_task(keep_alive()),
            asyncio.create_task(self._drain(server, stopping)),
        ]
        tasks = [asyncio.create_task(one.serve(sockets=[listener])) for one, listener in servers]
        with self._signals(server, stopping, forced):
            try:
                await _started([one for one, _ in servers], tasks)
                notify(READY)
                on_serving()
                await tasks[0]
            finally:
                for one, listener in servers:
                    one.should_exit = True
                    listener.close()
                await asyncio.gather(*tasks, return_exceptions=True)
                await _end_connections(server)
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)
        return ExitCode.FORCED if forced.is_set() else ExitCode.OK

    @contextlib.contextmanager
    def _signals(self, server: _Server, stopping: asyncio.Event, forced: asyncio.Event) -> Iterator[None]:
        """Listen to the signals inside the block."""

        def stop() -> None:
            if self.front.draining:
                forced.set()
                server.force_exit = server.should_exit = True
                return
            self.front.draining = True
            notify(STOPPING)
            stopping.set()

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGHUP: self.front.refresh}
        with listening(asyncio.get_running_loop(), handlers):
            yield

    async def _drain(self, server: _Server, stopping: asyncio.Event) -> None:
        """Once the end has begun, wait for the streams that run; then let the server end."""
        await stopping.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.drain_s):
                while self.front.running:  # noqa: ASYNC110 - requests end where nobody looks
                    await asyncio.sleep(LOOK_S)
        server.should_exit = True


async def _end_connections(server: _Server) -> None:
    """Let what was called off at the end of the draining time clean up, and close what is still open."""
    state = server.server_state
    if state.tasks:
        await asyncio.wait(state.tasks, timeout=CLEAN_UP_S)
    for connection in list(state.connections):
        connection.transport.abort()


async def _started(servers: list[_Server], tasks: list[asyncio.Task[None]]) -> None:
    """Wait until all accept connections (the sockets listen already: this is a matter of some turns of the loop)."""
    while not all(server.started for server in servers):
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.01)
